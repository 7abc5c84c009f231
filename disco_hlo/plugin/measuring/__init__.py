"""What is run and timed on the devices: the profile of a step, and candidates in turn."""
