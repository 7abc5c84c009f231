"""The scripts' own folder is on the path, as when Python runs one of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
