from halfbyte.bench.machine import describe_machine, list_versions


def test_machine_and_versions_are_named() -> None:
    machine = describe_machine()
    assert machine["cpu"]
    assert int(machine["cores"]) >= 1
    versions = list_versions(("torch", "no-such-distribution"))
    assert versions["torch"][0].isdigit()
    assert versions["no-such-distribution"] == "not installed"
