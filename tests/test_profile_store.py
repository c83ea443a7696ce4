import json
from pathlib import Path

import pytest

from simcore import cluster, curves, profile_store
from simcore.errors import ClusterError, ProfileError

T4 = json.loads((profile_store.SHIPPED / "devices" / "T4-16GB.json").read_text())
QPI = json.loads((profile_store.SHIPPED / "links" / "QPI.json").read_text())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLACEWRIGHT_HOME", str(tmp_path))
    for part in ("devices", "links", "curves", "clusters"):
        (tmp_path / part).mkdir()
    return tmp_path


def write(path: Path, record: dict[str, object], **changes: object) -> None:
    path.write_text(json.dumps({**record, "kind": path.stem, **changes}))


def test_a_users_profile_is_found_listed_and_read_again_when_it_changes(home: Path) -> None:
    assert "local-CPU-core" not in profile_store.device_kinds()
    with pytest.raises(ProfileError, match="unknown device kind 'local-CPU-core'"):
        profile_store.load_profile("local-CPU-core")
    path = home / "devices" / "local-CPU-core.json"
    write(path, T4)
    assert "local-CPU-core" in profile_store.device_kinds()
    assert profile_store.load_profile("local-CPU-core").launch_overhead > 0
    overhead = {**T4["launch_overhead_us"], "value": 1234.5}
    write(path, T4, launch_overhead_us=overhead)
    loaded = profile_store.load_profile("local-CPU-core")
    assert loaded.launch_overhead_us.value == 1234.5
    assert profile_store.load_profile("local-CPU-core") is loaded


def test_a_users_file_hides_the_shipped_one_until_it_is_gone(home: Path) -> None:
    shipped = profile_store.load_link("QPI")
    path = home / "links" / "QPI.json"
    write(path, QPI, bandwidth_GBps={**QPI["bandwidth_GBps"], "value": 3.0})
    assert profile_store.load_link("QPI").bandwidth_GBps.value == 3.0
    path.unlink()
    assert profile_store.load_link("QPI") == shipped


def test_a_kind_cannot_reach_out_of_the_folders(home: Path) -> None:
    write(home / "stray.json", T4)
    for kind in ("../stray", str(home / "stray"), "a\0b", ""):
        with pytest.raises(ProfileError, match="unknown device kind"):
            profile_store.load_profile(kind)


def test_local_is_a_preset_once_it_was_collected(home: Path) -> None:
    assert "local" not in cluster.presets()
    with pytest.raises(ClusterError, match="run `placewright calibrate collect`"):
        cluster.resolve("local")
    (home / "clusters" / "local.toml").write_text(
        'format = "placewright-cluster/1"\nname = "local"\n'
        'devices = [{ name = "cpu0", kind = "T4-16GB" }]\n'
    )
    assert "local" in cluster.presets()
    assert cluster.resolve("local").device_names == ("cpu0",)


def test_a_users_curve_is_seen_as_soon_as_it_is_written(home: Path) -> None:
    key = curves.CurveKey("all_reduce", "auto", 2, "here")
    assert key not in curves.shipped_curves()
    points = [{"bytes": 1000, "time_us": 20.0}, {"bytes": 2000, "time_us": 30.0}]
    record = {
        "format": "placewright-collective-curve/1",
        **dict(zip(("kind", "algorithm", "num_members", "topology"), key, strict=True)),
        "description": "made up",
        "points": {"value": points, "tag": "fitted", "source": "a test", "date": "2026"},
    }
    (home / "curves" / "one.json").write_text(json.dumps(record))
    assert curves.shipped_curves()[key].time(2000) == pytest.approx(30e-6)
