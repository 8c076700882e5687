"""Chats to tokens: what is trained on, what is masked, where steps lie and which states are equal."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.errors import TrajectoryError
from streamadv.trajectory.adapters import FORMATS
from streamadv.trajectory.adapters.chat import BOUNDARY_IDS, read_chat, tokenize_chat
from streamadv.trajectory.schema import parse_trajectory
from tests.shares import examples


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls):
    message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}_{text}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


def tool(name, text):
    return {"role": "tool", "tool_call_id": "call_0", "name": name, "content": text}


def text_of(ids):
    names = {number: f"<{name}>" for name, number in BOUNDARY_IDS.items()}
    pieces = [names[i].encode() if i in names else bytes([i]) for i in ids.tolist()]
    return b"".join(pieces).decode()


def test_assistant_turns_are_trained_and_all_else_is_masked():
    chat = tokenize_chat([system("Be kind."), user("Hé?"), assistant("Yes."), user("Ok"), assistant("Bye")])
    assert (
        text_of(chat.input_ids)
        == "<system>Be kind.<end><user>Hé?<end><assistant>Yes.<end><user>Ok<end><assistant>Bye<end>"
    )
    assert text_of(chat.input_ids[chat.response_mask == 1]) == "Yes.<end>Bye<end>"
    assert [text_of(chat.input_ids[s["start"] : s["end"]]) for s in chat.steps] == ["Yes.<end>", "Bye<end>"]


def test_tool_calls_are_trained_and_tool_results_are_not():
    messages = [
        user("Weather?"),
        assistant(None, ("weather", '{"city": "Rome"}'), ("time", None)),
        tool("weather", "sunny"),
        assistant("It is sunny.", ("done", {"ok": True})),
    ]
    chat = tokenize_chat(messages)
    assert text_of(chat.input_ids[chat.response_mask == 1]) == (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><end>'
        'It is sunny.\n<tool_call>\n{"name": "done", "arguments": {"ok": true}}\n</tool_call><end>'
    )
    assert "<tool>weather\nsunny<end>" in text_of(chat.input_ids[chat.response_mask == 0])


def test_other_spellings_of_the_same_chat_give_the_same_tokens():
    plain = tokenize_chat([user("a b"), assistant(None, ("f", "{}")), tool("f", "1"), assistant("c")])
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    other = tokenize_chat(
        (
            {"role": "user", "content": parts, "name": "Ann"},
            {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "1"},
            {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None, "annotations": []},
        )
    )
    assert plain.input_ids.tolist() == other.input_ids.tolist()
    assert plain.steps == other.steps


def test_text_cannot_imitate_a_boundary():
    chat = tokenize_chat([user("<end><assistant><|im_start|>"), assistant("x")])
    assert np.isin(chat.input_ids, list(BOUNDARY_IDS.values())).sum() == 4


def test_a_tokenizer_gets_text_and_boundaries():
    seen = []

    def words(text):
        seen.append(text)
        return [len(text)]

    chat = tokenize_chat([user("abc"), assistant("de"), user("")], words)
    start, end = "<|im_start|>", "<|im_end|>\n"
    assert seen == [f"{start}user\n", "abc", end, f"{start}assistant\n", "de", end, f"{start}user\n", end]
    assert chat.response_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    with pytest.raises(TrajectoryError, match="beyond int32"):
        tokenize_chat([user("abc"), assistant("de")], lambda _: [2**40])


def test_equal_observations_share_a_state_whatever_went_before():
    one = tokenize_chat([user("go"), assistant("left"), tool("look", "wall"), assistant("back")]).steps
    two = tokenize_chat([user("go"), assistant("right"), tool("look", "wall"), assistant("up")]).steps
    assert [a["state_key"] == b["state_key"] for a, b in zip(one, two, strict=True)] == [True, True]
    assert one[0]["state_key"] != one[1]["state_key"]


def test_different_observations_differ_in_state():
    chats = [  # each observation must be told from all others, also where texts run into one another
        [user("ab")],
        [user("a"), user("b")],
        [user("auserb")],
        [system("ab")],
        [tool("a", "b")],
        [tool("ab", "")],
        [user("a"), system("b")],
    ]
    keys = {tokenize_chat([*chat, assistant("x")]).steps[0]["state_key"] for chat in chats}
    assert len(keys) == len(chats)


def test_a_turn_that_answers_nothing_has_no_state():
    steps = tokenize_chat([user("go"), assistant("one"), assistant("two")]).steps
    assert [step["state_key"] is None for step in steps] == [False, True]


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=20)}
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(MESSAGE, max_size=8))
def test_steps_are_exactly_the_trainable_tokens(messages):
    messages = [*messages, assistant("end")]
    chat = tokenize_chat(messages)
    covered = np.zeros(len(chat.input_ids), np.uint8)
    for step in chat.steps:
        covered[step["start"] : step["end"]] += 1
    assert covered.tolist() == chat.response_mask.tolist()
    assert len(chat.steps) == sum(m["role"] == "assistant" for m in messages)
    parse_trajectory({"group_id": "g", "group_size": 1, "rollout_index": 0, "reward": 1, **chat._asdict()})


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "messages: is None, needs a list"),
        ("hello", "messages: is 'hello', needs a list"),
        ({"role": "user"}, "messages: is a dict, needs a list"),
        ([], "no assistant message"),
        ([user("x")], "no assistant message"),
        (["hello"], "messages.0: is 'hello', needs an object"),
        ([user("x"), {"content": "y"}], "messages.1.role: is None, needs one of"),
        ([{"role": "robot", "content": "y"}], "messages.0.role: is 'robot', needs one of"),
        ([{"role": "end", "content": "y"}], "messages.0.role"),
        ([{"role": ["user"], "content": "y"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content: is missing"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content: is 5"),
        ([{"role": "user", "content": {"text": "x"}}], "messages.0.content: is a dict"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages.0.content.0: is 'image_url', needs a part with text",
        ),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
        ([{"role": "tool", "name": 5, "content": "x"}], "messages.0.name"),
        ([{"role": "assistant", "tool_calls": 5}], "messages.0.tool_calls: is 5, needs a list"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages.0.tool_calls.0"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages.0.tool_calls.0.name"),
        ([{"role": "assistant", "function_call": "f"}], "messages.0.function_call"),
    ],
)
def test_odd_messages_are_one_line_that_names_the_place(messages, problem):
    with pytest.raises(TrajectoryError) as error:
        tokenize_chat(messages, where="file: record 3")
    assert problem in str(error.value)
    assert str(error.value).startswith("file: record 3: ")
    assert str(error.value).isprintable()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chats.jsonl"


def record(group_id="g", rollout_index=0, **fields):
    head = {"group_id": group_id, "rollout_index": rollout_index, "reward": 1.0}
    return {**head, "messages": [user("a"), assistant("b")], **fields}


@pytest.mark.parametrize("form", ["lines", "list"])
def test_a_file_of_chats(path, form):
    records = [record("a", 0), record(7, 0, reward=None), record("a", 1, status="truncated"), record("a", 1)]
    del records[0]["reward"]
    lines = "\n\n".join(map(json.dumps, records))
    path.write_text(lines if form == "lines" else json.dumps(records, indent=2))
    read = list(FORMATS["chat"](path))
    assert [(t.group_id, t.group_size, t.rollout_index, t.scored) for t in read] == [
        ("a", 2, 0, False),
        ("7", 1, 0, True),
        ("a", 2, 1, True),
        ("a", 2, 1, True),
    ]
    assert read[1].reward is None
    assert read[2].status == "truncated"


def test_indices_with_gaps_are_renumbered_unless_the_size_is_given(path):
    path.write_text(json.dumps([record("a", 5), record("a", 2), record("b", 2, group_size=8)]))
    assert [(t.group_size, t.rollout_index) for t in read_chat(path)] == [(2, 1), (2, 0), (8, 2)]


def test_names_of_other_frameworks_are_accepted(path):
    records = [
        {"uid": "a", "repetition_id": 0, "reward": 1, "messages": [assistant("x")]},
        {"task_id": 4, "trial": 1, "num_generations": 8, "policy_version": 3, "messages": [assistant("x")]},
    ]
    path.write_text(json.dumps(records))
    one, two = read_chat(path)
    assert (one.group_id, one.group_size, one.rollout_index) == ("a", 1, 0)
    assert (two.group_id, two.group_size, two.rollout_index, two.model_version) == ("4", 8, 1, 3)


def test_a_failed_rollout_needs_no_messages(path):
    path.write_text(json.dumps([record(status="failed", messages=[])]))
    assert next(read_chat(path)).rows == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no record"),
        (b"[]", "holds no record"),
        (b"[1]", "record 0: is 1, needs an object"),
        (b"[" * 10**5, "no valid JSON"),
        (b'[{"group_id": "\xff"}]', "no valid JSON"),
        (json.dumps([record()]).encode()[:-9], "no valid JSON"),
        (json.dumps(record()).encode() + b"\n5", "jsonl:2: is 5, needs an object"),
        (json.dumps([record(), record(None)]).encode(), "record 1: group_id: is None"),
        (json.dumps([record("a b")]).encode(), "record 0: group_id: is 'a b'"),
        (json.dumps([record(rollout_index="0")]).encode(), "record 0: rollout_index: is '0'"),
        (json.dumps([record(rollout_index=True)]).encode(), "record 0: rollout_index: is True"),
        (json.dumps([record(rollout_index=-1)]).encode(), "record 0: rollout_index: is -1"),
        (json.dumps([record(reward=float("nan"))]).encode(), "record 0: reward"),
        (json.dumps([record(rewrad=1)]).encode(), "record 0: rewrad: is no known field"),
        (json.dumps([record(**{"a\nb": 1})]).encode(), r"record 0: a\nb: is no known field"),
        (json.dumps([record(input_ids=[1])]).encode(), "record 0: input_ids: is no known field"),
        (json.dumps([record(messages="x")]).encode(), "record 0: messages: is 'x'"),
        (json.dumps([record(uid="g")]).encode(), "record 0: uid: means the same as group_id"),
        (json.dumps([{"uid": [], "trial": 0}]).encode(), "record 0: uid: is a list"),
        (json.dumps([{"group_id": "a", "rollout_index": 0}]).encode(), "record 0: messages: is missing"),
        (json.dumps([{"group_id": "a"}]).encode(), "record 0: rollout_index: is missing"),
    ],
)
def test_odd_files_are_one_line_that_names_record_and_field(path, content, problem):
    path.write_bytes(content)
    with pytest.raises(TrajectoryError) as error:
        list(read_chat(path))
    assert problem in str(error.value)
    assert str(error.value).startswith(str(path))
    assert str(error.value).isprintable()
