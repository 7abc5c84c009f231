"""What a step is run on where its own inputs are not at hand: made-up numbers that it could meet in training."""
