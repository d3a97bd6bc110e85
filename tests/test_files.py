"""Files are whole or absent."""

import resource
import subprocess
import sys

import pytest

from heedful.files import write


def test_a_file_is_written_with_its_folder(tmp_path):
    assert write(tmp_path / "new" / "file.txt", "text").read_text() == "text"


def test_a_file_is_readable_by_others_as_the_umask_says(tmp_path):
    assert write(tmp_path / "file", b"x").stat().st_mode & 0o400


def test_nothing_but_the_file_is_left_behind(tmp_path):
    write(tmp_path / "file", "one")
    write(tmp_path / "file", "two")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


FULL = """
import resource, signal, sys
from heedful.files import write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write(sys.argv[1], b"x" * 5000)
except OSError as error:
    print(error.strerror)
"""


def test_a_full_disk_leaves_the_old_file_and_says_so(tmp_path):
    old = write(tmp_path / "file", "old")
    said = subprocess.run([sys.executable, "-c", FULL, str(old)], capture_output=True, text=True, check=True).stdout
    assert "cannot write" in said
    assert "make room" in said
    assert old.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)  # the limit was the other process's


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write .*file/below"):
        write(tmp_path / "file" / "below", "text")
