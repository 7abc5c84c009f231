"""What a state takes: of its units, of its order, and by the paper's ready queues."""
