"""`hf_dist.metrics_port`: a real Prometheus client reads the numbers of a run while it trains; the port closes with it."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import TrainerCallback

from hf_dist.config import examine
from hf_dist.dist import watchdog
from hf_dist.dist.metrics_server import MetricsServer, address_of, exposition
from hf_dist.errors import ConfigError
from hf_dist.hf.callbacks.metrics import MetricsCallback
from hf_dist.planning.device_peak import peak_flops
from tests.hf.test_monitors import trained

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(port: int, page: str = "metrics") -> tuple[int, str]:
    """(status, text) of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def parsed(text: str) -> Samples:
    """(name, labels) -> value, as the client library of Prometheus reads the page."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Reads(TrainerCallback):
    """Reads all pages after the last step, in the middle of the training."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, str]] = {}
        self.port = 0

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs after ours, which was added before."""
        running = MetricsCallback._running
        if running is not None and state.global_step == 3 and "loss" in kwargs["logs"]:
            self.port = running.port
            self.pages = {page: read(running.port, page) for page in ("metrics", "health", "else")}


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_client_reads_a_run_and_the_port_closes_at_its_end(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads()
    add = MetricsCallback.on_train_begin

    def add_reader(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        add(self, args, state, control, **kwargs)
        self._trainer().add_callback(reads)

    monkeypatch.setattr(MetricsCallback, "on_train_begin", add_reader)
    trainer = trained(tmp_path, {"hf_dist": {"metrics_port": port}})
    (record,) = [record for record in trainer.state.log_history if record.get("step") == 3 and "loss" in record]
    assert [reads.pages[page][0] for page in ("metrics", "health", "else")] == [200, 200, 404]
    found = parsed(reads.pages["metrics"][1])
    assert reads.port == port and found["hf_dist_step", ()] == 3
    for name, value in {
        "loss": record["loss"],
        "grad_norm": record["grad_norm"],
        "tokens_per_second_per_rank": record["tokens_per_second_per_rank"],
        "model_flops_per_second_per_rank": record["model_tflops_per_rank"] * 1e12,
        "skipped_steps_total": 0,
    }.items():
        assert found[f"hf_dist_{name}", ()] == pytest.approx(value), name
    assert found["hf_dist_memory_peak_bytes", (("rank", "0"),)] == pytest.approx(record["memory_peak_gb"] * 1e9)
    assert found["hf_dist_time_percent", (("phase", "data"),)] == pytest.approx(record["time_data_percent"])
    assert 0 <= found["hf_dist_seconds_since_step", ()] < 600
    assert not any(name in ("hf_dist_checkpoint_age_seconds", "hf_dist_device_peak_percent") for name, _ in found)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_in_use_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"hf_dist.metrics_port: {port} cannot be listened at: .*in use"):
            trained(tmp_path, {"hf_dist": {"metrics_port": port}})


def test_an_address_of_another_family_is_listened_at() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        server = MetricsServer(f"[::1]:{_free()}", lambda: "", lambda: "")
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    socket.create_connection(("::1", server.port), timeout=60).close()
    server.close()


def test_health_is_503_while_the_verdict_of_the_watchdog_holds() -> None:
    verdicts = ["", "no progress for 63 s at step 8; rank 5 is late", ""]
    server = MetricsServer(_free(), lambda: "", lambda: verdicts.pop(0))
    try:
        answers = [read(server.port, "health") for _ in range(3)]
    finally:
        server.close()
    assert [code for code, _ in answers] == [200, 503, 200] and "rank 5 is late" in answers[1][1]


def test_the_verdict_is_the_head_of_the_last_report_or_who_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watchdog.verdict() == "" or watchdog.thread._watchdog is not None
    one: Any = type("Watchdog", (), {"verdict": watchdog.thread.Watchdog.verdict})()
    one._departure = watchdog.thread.Departure()
    one._report = "hf_dist watchdog: no progress for 9 s\n  rank 1 is late, in: data loader\n  Python stack"
    monkeypatch.setattr(watchdog.thread, "_watchdog", one)
    assert watchdog.verdict() == "hf_dist watchdog: no progress for 9 s; rank 1 is late, in: data loader"
    one._departure.note("rank 3 ended: it left without an error")
    assert watchdog.verdict() == "rank 3 ended: it left without an error"


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_client_that_sends_nothing_or_leaves_disturbs_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    server = MetricsServer(_free(), lambda: "x 1\n", lambda: "")
    try:
        silent = socket.create_connection(("127.0.0.1", server.port))
        leaves = socket.create_connection(("127.0.0.1", server.port))
        leaves.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        leaves.close()
        assert read(server.port) == (200, "x 1\n")
        silent.close()
    finally:
        server.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "value", "address"),
    [
        (9400, 9400, ("127.0.0.1", 9400)),
        ("9400", 9400, ("127.0.0.1", 9400)),
        ("0.0.0.0:9400", "0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("[::]:9400", "[::]:9400", ("::", 9400)),
    ],
)
def test_an_address_is_read(given: Any, value: Any, address: tuple[str, int]) -> None:
    config, problems = examine({"hf_dist": {"metrics_port": given}})
    assert not problems and config.hf_dist.metrics_port == value and address_of(value) == address


@pytest.mark.parametrize("given", [0, 65536, -1, "host", "host:", "host:x", True, 9400.5])
def test_what_is_no_port_is_refused(given: Any) -> None:
    _, problems = examine({"hf_dist": {"metrics_port": given}})
    assert problems and "hf_dist.metrics_port" in str(problems[0])


def test_labels_are_escaped_and_values_are_exact() -> None:
    text = exposition({"a": ("what", "gauge", [({"l": 'a "b"\\\n'}, 0.1), ({}, 1e300)]), "none": ("x", "gauge", [])})
    assert parsed(text) == {("a", (("l", 'a "b"\\\n'),)): 0.1, ("a", ()): 1e300}


def test_the_peak_of_a_device_is_known_by_its_name() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12 and peak_flops("Tesla T4") == 65e12
    assert peak_flops("Tesla V100-PCIE-16GB") == 112e12 and peak_flops("Tesla V100-SXM2-32GB") == 125e12
    assert peak_flops("AMD Instinct MI250X") == 191.5e12 and peak_flops("NVIDIA GB300") == 2500e12
    assert peak_flops("NVIDIA A10G") is None and peak_flops("NVIDIA L40") is None
