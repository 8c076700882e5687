"""The policy: a model of transformers, and the vLLM that samples it. Start vLLM on this machine, by

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs     # the first lets it load new weights
"""

import asyncio
import json
import shutil
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import transformers

import streamadv as sa
from streamadv.integrations.engines import EngineClient

SETTINGS = tomllib.loads(Path("streamadv.toml").read_text())
ENGINE, MODEL = SETTINGS["policy"]["engine"], SETTINGS["policy"]["model"]
TOKENIZER = "tokenizer"  # folder of what people read the tokens by


def new_policy():
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(TOKENIZER)
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL).float().eval()


class Engine(EngineClient):
    """vLLM, which takes over the trainer's newest weights before a group begins."""

    loading = asyncio.Lock()

    async def refresh(self, loader):
        async with self.loading:
            while self.version is None or self.version != sa.weights.newest("weights"):
                try:
                    self.version = await asyncio.to_thread(load_newest)
                except urllib.error.HTTPError:  # such as 404: vLLM was started without the variable above
                    raise
                except OSError as error:
                    print(f"waiting for vLLM at {ENGINE}: {error}")
                    await asyncio.sleep(2)


def load_newest():
    version = sa.weights.newest("weights")
    folder = Path("weights/of-engine").absolute()  # vLLM loads all files of a folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "model.safetensors").hardlink_to(sa.weights.path_of("weights", version))
    body = json.dumps({"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{ENGINE}/collective_rpc", body, headers)).close()
    return version


def new_engine():
    return Engine(ENGINE, temperature=1.0)
