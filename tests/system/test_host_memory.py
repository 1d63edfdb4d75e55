"""The memory that is left within the limits of control groups, of both versions."""

from pathlib import Path

from pgtoolkit.system.host_memory import available_bytes, left_in_groups


def group(folder: Path, limit: tuple[str, str], taken: tuple[str, int], stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit[0]).write_text(f"{limit[1]}\n")
    (folder / taken[0]).write_text(f"{taken[1]}\n")
    (folder / "memory.stat").write_text(stat)


def test_the_limits_of_a_group_and_of_those_above_it_count(tmp_path):
    """Pages of files that nobody has read for a while are given away."""
    groups = tmp_path / "groups"
    of_process = tmp_path / "cgroup"
    stat = "anon 500\ninactive_file 30\nactive_file 7\n"
    group(groups / "job" / "step", ("memory.max", "max"), ("memory.current", 400), stat)
    group(groups / "job", ("memory.max", "1000"), ("memory.current", 600), stat)
    group(groups, ("memory.max", "5000"), ("memory.current", 5100), stat)
    of_process.write_text("0::/job/step\n")
    assert [*left_in_groups(groups, of_process)] == [430, 0]
    of_process.write_text("0::/\n")
    assert [*left_in_groups(groups, of_process)] == [0]
    files = (("memory.limit_in_bytes", "900"), ("memory.usage_in_bytes", 200))
    group(groups / "memory" / "job", *files, "inactive_file 3\ntotal_inactive_file 50\n")
    of_process.write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    assert [*left_in_groups(groups, of_process)] == [750]
    assert [*left_in_groups(groups, tmp_path / "missing")] == []


def test_some_memory_is_left_here():
    assert 2**20 < available_bytes() < 2**50
