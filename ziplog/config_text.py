"""The text of a cluster file, with or without the meaning of every key. Pure.

Invariant: `ziplog.config.load` of the text returns the same configuration.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import TYPE_CHECKING, Any

from ziplog.config_keys import keys_of
from ziplog.config_tables import LimitsConfig

if TYPE_CHECKING:
    from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
    from ziplog.config_keys import Key


def dump(config: ClusterConfig, *, explain: bool = False) -> str:
    """Return the text of a cluster file; `explain` adds the meaning of every key."""
    rows = _head(explain)
    rows += ["[cluster]", *_rows(config, explain=explain)]
    if explain:
        rows += ["# Each node keeps its files in data_dir/NAME."]
    rows.append(f"data_dir = {_quote(str(config.data_dir))}")
    rows += ["", "[log]", *_rows(config.log, explain=explain)]
    if config.monitor is not None:
        rows += ["", "[monitor]", *_rows(config.monitor, explain=explain)]
    if explain or config.limits != LimitsConfig():
        rows += ["", "[limits]", *_rows(config.limits, explain=explain)]
    for title, nodes in (("mms", config.mms), ("failure_handler", config.failure_handlers)):
        for node in nodes:
            rows += ["", f"[[{title}]]", *_rows(node, explain=explain and node is nodes[0])]
    for shard in config.shards:
        rows += _shard_rows(shard, explain=explain and shard is config.shards[0])
    return "\n".join(rows) + "\n"


def dump_shard(shard: ShardConfig) -> str:
    """Return the part of a cluster file for one shard; it can be appended to a file."""
    return "\n".join(_shard_rows(shard, explain=False)) + "\n"


def _head(explain: bool) -> list[str]:
    return ["# Every key of a cluster file. Unknown keys are refused.", ""] if explain else []


def _shard_rows(shard: ShardConfig, *, explain: bool) -> list[str]:
    rows = ["", "[[shard]]", *_rows(shard, explain=explain)]
    if explain:
        rows.append("# Its storage servers, the primary first: f+1 of them.")
    return [*rows, "replicas = [", *(f"    {_inline(node)}," for node in shard.replicas), "]"]


def _rows(table: Any, *, explain: bool) -> list[str]:
    kind: type = type(table)  # not type[Any]: mypy refuses it as a cache key
    rows = []
    for name, (key, default) in keys_of(kind).items():
        value = getattr(table, name)
        if explain:
            rows += _explain(key, default)
        if value is not None:
            rows.append(f"{name} = {_render(value)}")
        elif explain:
            rows.append(f"# {name} =")
    return rows


def _explain(key: Key, default: Any) -> list[str]:
    if default is dataclasses.MISSING:
        usual = "required"
    else:
        usual = "default: none" if default is None else f"default: {_render(default)}"
    about = textwrap.wrap(key.about, 98)
    return [*(f"# {line}" for line in about), f"#   {key.allowed}; {usual}"]


def _inline(node: NodeConfig) -> str:
    return f"{{ {', '.join(_rows(node, explain=False))} }}"


def _render(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else _quote(str(value))


def _quote(text: str) -> str:
    # JSON's escapes are valid in TOML, except that TOML does not allow a raw DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
