"""What the system says that a process costs: memory that no library tells of, and the CPU time of its first thread.

Most processes here have their event loop in that thread. Its CPU seconds are those for which it keeps everybody else
waiting, whatever else the machine does.
"""

import re
from pathlib import Path


def most_resident_bytes(pid: int) -> int:
    """The most memory that a process ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found, status
    return int(found.group(1)) * 1024


def first_thread_seconds(pid: int) -> float:
    """CPU seconds that the first thread of a process has used."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
