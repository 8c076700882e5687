"""An engine at http://localhost:8000 that calls a tool and then answers, and what a page's reader has of their own."""

from types import SimpleNamespace

from streamadv.integrations.engines import client as engine_client
from tests.unit.integrations.fake_engine import END, ROLES, FakeEngine, serving


def policy(prompt):
    return "It is sunny." if ROLES["tool"] in prompt else "Let me see.!weather"


engine_server = serving(FakeEngine(policy))
fake = engine_server.__enter__()
asked = engine_client.aiohttp.ClientSession.request


def elsewhere(self, method, url, **options):
    return asked(self, method, url.replace("http://localhost:8000", fake.url), **options)


engine_client.aiohttp.ClientSession.request = elsewhere

tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


async def use_tool(call):
    return "31 C, no clouds"


async def answer_calls(text):
    return "31 C, no clouds" if "!" in text else None


def encode(messages):
    return [
        token for message in messages for token in (ROLES[message["role"]], *message["content"].encode(), END)
    ]


def create(model, messages, logprobs, extra_body):
    asked = {"messages": messages, "logprobs": logprobs, **extra_body}
    return SimpleNamespace(model_dump=lambda: fake.answer("/v1/chat/completions", asked))


client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
