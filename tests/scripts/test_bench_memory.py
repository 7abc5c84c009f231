"""What a script's processes need of memory, told by a script that needs little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import bench_memory
import pytest


def test_the_largest_process_and_all_together(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "assert os.environ.get('ENABLE_SEARCH') == '1' and os.environ['DISCO_DIR'] == sys.argv[1]\n"
        "block = bytearray(64 << 20)\n"
        "if os.fork() == 0:\n"
        "    block[::4096] = bytes(len(block[::4096])); time.sleep(1)\n"
        "else:\n"
        "    block[::4096] = bytes(len(block[::4096])); os.wait()\n"
    )
    # Linux counts what a process had resident when it started another one, so a small one must start the script.
    asked = "import sys, bench_memory, pathlib; folder = sys.argv[1]; "
    asked += "print(*bench_memory.run_phase('1', pathlib.Path(folder), [sys.argv[2], folder]))"
    scripts = Path(bench_memory.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", asked, str(tmp_path), str(script)],
        cwd=scripts,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    largest, together = map(int, done.stdout.split())
    assert 64 << 20 < largest < 200 << 20
    assert together > 64 << 20


def test_a_script_that_fails_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        bench_memory.run_phase(None, tmp_path, [str(tmp_path / "train.py")])
