"""The three phases, capturing, searching and enacting, and what only they need."""
