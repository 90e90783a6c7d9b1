"""What can't be run as asked reaches whoever starts the engine as one ConfigError, wherever it came up."""

import asyncio
import os
import socket
import threading

import pytest
import torch

from tidegate.base.errors import ConfigError
from tidegate.base.events import LaneGone
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core
from tidegate.node import wire
from tidegate.node.client import start_engine
from tidegate.node.config import EngineConfig
from tidegate.node.node import Node


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"device": "cpu", "sharing": "capped"}, "--sharing capped needs a GPU"),
        ({"device": "cpu", "sharing": "mps"}, "--sharing mps needs a GPU"),
        ({"device": "cpu", "dtype": "bfloat16"}, "--dtype bfloat16 needs a GPU"),
        ({"device": "tpu"}, "choose auto, cpu or cuda"),
        ({"device": "cpu", "max_model_len": 4000, "num_blocks": 10}, "--max-model-len"),
    ],
)
def test_settings_that_do_not_fit_the_machine(tiny_config, asked, words):
    with pytest.raises(ConfigError, match=words):
        asyncio.run(start_engine(EngineConfig(model=tiny_config, load_format="dummy", **asked)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tiny_config):
    with pytest.raises(ConfigError, match=r"no GPU can be used: .* --device cpu"):
        asyncio.run(start_engine(EngineConfig(model=tiny_config, load_format="dummy", device="cuda")))


class GoneLanes:
    """A lane host whose only lane is gone as soon as somebody looks."""

    def __init__(self, event):
        self._event = event
        self._bell = os.eventfd(1)

    def watch(self, register, forget):
        register(self._bell, lambda: [self._event])


@pytest.mark.parametrize("config", [True, False])
def test_a_lane_that_is_gone_ends_the_node_with_its_reason(config):
    core = Core(CoreConfig(10, 16, 4, 100, 500, 64, mode="chunked"))
    ours, theirs = socket.socketpair()
    node = Node(core, core.on_event, GoneLanes(LaneGone("D", "lower --x", config)), wire.Channel(theirs, wire.ToNode))
    thread = threading.Thread(target=node.run, args=(None,))
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    (fatal,), _ = wire.Channel(ours, wire.FromNode).receive()
    assert fatal.config is config
    assert fatal.reason == ("lower --x" if config else "lane D could not be kept running: lower --x")
