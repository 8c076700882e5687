"""vLLM on the CPU with the small model of examples/any_agent, as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamadv.store.embedded import free_port

EXAMPLE = Path(__file__).parents[3] / "examples" / "any_agent"
#: Seconds until it answers; three processes import torch, one after the other.
START_S = 280.0
FLAGS = (
    "--served-model-name tiny --host 127.0.0.1 --dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 64 "
    "--enable-scale-out --logprobs-mode processed_logprobs --enable-auto-tool-choice --tool-call-parser hermes"
)
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def make_model(folder: Path) -> None:
    subprocess.run([sys.executable, "model.py", str(folder)], cwd=EXAMPLE, check=True)


@contextmanager
def vllm(model: Path, log: Path) -> Iterator[str]:
    """Its URL. STREAMADV_VLLM_URL and STREAMADV_VLLM_MODEL: of one that is there, in place of a new one."""
    if url := os.environ.get("STREAMADV_VLLM_URL"):
        yield url
        return
    port = free_port()
    words = ["--model", str(model), "--port", str(port), *FLAGS.split()]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **VARIABLES}, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(f"vLLM did not start: {log.read_text(errors='replace')[-3000:]}")
