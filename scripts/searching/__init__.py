"""What the search is measured by: the steps, the runs, and the record of what they gave."""
