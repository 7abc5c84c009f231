"""Files that are nearly right: what a full disk, a bad copy or a stranger makes of them."""
