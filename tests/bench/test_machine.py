from halfbyte.bench.machine import describe_machine, list_versions, read_peak_memory_bytes


def test_machine_and_versions_are_named() -> None:
    machine = describe_machine()
    assert machine["cpu"]
    assert int(machine["cores"]) >= 1
    versions = list_versions(("torch", "no-such-distribution"))
    assert versions["torch"][0].isdigit()
    assert versions["no-such-distribution"] == "not installed"


def test_peak_memory_is_in_bytes() -> None:
    block = bytearray(64 << 20)
    peak = read_peak_memory_bytes()
    assert peak is None or len(block) < peak < 1 << 44
