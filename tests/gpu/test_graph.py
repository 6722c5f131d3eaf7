"""Recorded passes give the numbers of passes that are told one by one."""

import pytest

from mpipar.config import read_recipe
from mpipar.errors import ConfigError


def test_what_cannot_be_recorded_is_refused_with_what_can():
    short = "[model]\nlayers = 4\nwidth = 64\nheads = 4\ncontext = 64\n"
    words = ["train.graph=true", "train.device=cuda"]
    assert read_recipe(short, words, ranks=2).train.graph
    wrong = [
        "parallel.pipeline=2", "parallel.tensor=2", "parallel.context=2",
        "model.dropout=0.1", "experts.count=4", "data.documents=separate",
        "parallel.zero=2",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        read_recipe(short, [*words, *wrong], ranks=16)
    told = caught.value.violations
    assert len(told) == len(wrong), told
    for word in wrong:
        key = word.partition("=")[0]
        assert any(text.startswith(key) and f"try {key} = " in text for text in told)
    with pytest.raises(ConfigError, match="other weights in each step"):
        read_recipe(short, [*words, "parallel.schedule=2bw"], ranks=1)
    with pytest.raises(ConfigError, match="needs a GPU"):
        read_recipe(short, [words[0], "train.device=cpu"], ranks=1)
