"""The cluster file: a written file loads again, and errors name the wrong key."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziplog.config import ClusterConfig, NodeConfig, ShardConfig, load, parse
from ziplog.config_keys import keys_of
from ziplog.config_tables import LimitsConfig, LogConfig, MonitorConfig, is_loopback
from ziplog.config_text import dump, dump_shard
from ziplog.errors import ConfigError

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


def example(**changes: object) -> ClusterConfig:
    config = ClusterConfig(
        name="demo",
        data_dir=Path("/tmp/demo"),
        mms=(NodeConfig("mms-0", "127.0.0.1", 7400, 7401),),
        failure_handlers=(NodeConfig("fh-0", "127.0.0.1", 7404, 7405),),
        shards=(
            ShardConfig(
                0,
                (
                    NodeConfig("shard-0-0", "127.0.0.1", 7402),
                    NodeConfig("shard-0-1", "localhost", 7403, archive_port=7410),
                ),
            ),
        ),
    )
    return dataclasses.replace(config, **changes)


@st.composite
def configs(draw: st.DrawFn) -> ClusterConfig:
    f = draw(st.integers(0, 3))
    mms = draw(st.sampled_from([1, 3]))
    handlers = draw(st.sampled_from([0, 1, 3]))
    shards = draw(st.integers(1, 3))
    count = mms + handlers + shards * (f + 1)
    names = draw(st.lists(NAMES, min_size=count, max_size=count, unique=True))
    both = count + mms + handlers
    ports = draw(st.lists(st.integers(1, 65535), min_size=both, max_size=both, unique=True))
    regions = st.none() | NAMES
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=shards, max_size=shards, unique=True))
    numbers = {
        name: draw(st.integers(key.low, key.high))
        for name, (key, _) in keys_of(ClusterConfig).items()
        if key.type is int and name not in {"f", "min_regions"}
    }
    numbers["rtt_ms"] = min(numbers["rtt_ms"], numbers["suspicion_ms"] // 4)
    agreeing = [
        NodeConfig(names.pop(), "127.0.0.1", ports.pop(), ports.pop())
        for _ in range(mms + handlers)
    ]
    return ClusterConfig(
        name=draw(NAMES),
        data_dir=Path("/") / draw(TEXTS),
        durability=draw(st.sampled_from(["memory", "disk"])),
        f=f,
        insecure=draw(st.booleans()),
        raft_password=draw(st.none() | TEXTS.map(lambda text: text + "x" * 16)),
        mms=tuple(agreeing[:mms]),
        failure_handlers=tuple(agreeing[mms:]),
        shards=tuple(
            ShardConfig(
                shard,
                tuple(
                    NodeConfig(names.pop(), "127.9.0.1", ports.pop(), region=draw(regions))
                    for _ in range(f + 1)
                ),
            )
            for shard in ids
        ),
        min_regions=1,
        **numbers,
    )


def write(directory: Path, text: str) -> Path:
    path = directory / "cluster.toml"
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return path


@given(configs(), st.booleans())
def test_a_dumped_file_loads_to_the_same_configuration(
    config: ClusterConfig, explain: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        assert load(write(Path(directory), dump(config, explain=explain))) == config


@given(configs())
def test_a_shard_may_be_appended_to_a_whole_file(config: ClusterConfig) -> None:
    *others, last = config.shards
    if others:
        text = dump(dataclasses.replace(config, shards=tuple(others))) + dump_shard(last)
        assert parse(text, Path("/anywhere/cluster.toml")) == config


def test_the_explained_file_shows_every_key_with_its_default_and_range() -> None:
    text = dump(example(), explain=True)
    for table in (ClusterConfig, LogConfig, NodeConfig, ShardConfig):
        for name, (key, _) in keys_of(table).items():
            assert name in text
            assert key.allowed in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_every_default_is_an_allowed_value() -> None:
    for name, (key, default) in keys_of(ClusterConfig).items():
        if default is not dataclasses.MISSING and default is not None:
            assert key.accepts(default), name


def test_a_file_without_a_log_table_has_the_defaults(tmp_path: Path) -> None:
    text = dump(example())
    start, end = text.index("[log]"), text.index("[[mms]]")
    assert load(write(tmp_path, text[:start] + text[end:])).log == LogConfig()
    text = text.replace('level = "info"', 'level = "debug"')
    assert load(write(tmp_path, text)).log == LogConfig(level="debug")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('level = "loud"', "level in .log. is 'loud'; it must be 'debug' or 'info'"),
        ("file_byte = 1", "unknown key 'file_byte' in .log.; did you mean 'file_bytes'"),
        ("files = 0", "files in .log. is 0; it must be a whole number, 1 to 100"),
    ],
)
def test_a_mistake_in_the_log_table_is_named(tmp_path: Path, line: str, reason: str) -> None:
    text = dump(example())
    start, end = text.index("[log]"), text.index("[[mms]]")
    with pytest.raises(ConfigError, match=reason):
        load(write(tmp_path, f"{text[:start]}[log]\n{line}\n\n{text[end:]}"))


def test_a_file_without_a_monitor_table_has_no_monitor(tmp_path: Path) -> None:
    assert load(write(tmp_path, dump(example()))).monitor is None
    text = dump(example(monitor=MonitorConfig(port=0)))
    assert load(write(tmp_path, text)).monitor == MonitorConfig("127.0.0.1", 0, None)


def test_limits_are_in_a_file_that_has_some(tmp_path: Path) -> None:
    assert "[limits]" not in dump(example())
    config = example(limits=LimitsConfig(inserts_per_s=100))
    assert load(write(tmp_path, dump(config))).limits == LimitsConfig(100, 0)
    text = f"{dump(example())}\n[limits]\ninsert_bytes_per_s = -1\n"
    with pytest.raises(ConfigError, match=r"insert_bytes_per_s in \[limits\] is -1"):
        load(write(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("port = 70000", "port in [monitor] is 70000; it must be a whole number, 0 to 65535"),
        ('host = "0.0.0.0"', "token_file in [monitor] is required, because its host '0.0.0.0'"),
        ("prot = 7480", "unknown key 'prot' in [monitor]; did you mean 'port'?"),
    ],
)
def test_a_mistake_in_the_monitor_table_is_named(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, f"{dump(example())}\n[monitor]\n{line}\n"))
    assert reason in str(caught.value)


def test_no_node_has_the_name_of_the_monitor() -> None:
    node = NodeConfig("monitor", "127.0.0.1", 7400, 7401)
    assert example(mms=(node,)).mms == (node,)
    with pytest.raises(ConfigError, match="'monitor' is used more than once"):
        example(mms=(node,), monitor=MonitorConfig())


def test_a_relative_data_directory_is_beside_the_file(tmp_path: Path) -> None:
    text = dump(example()).replace('"/tmp/demo"', '"data"')
    assert load(write(tmp_path, text)).data_dir == tmp_path / "data"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("epoch_ms = 10", "epoch_sm = 10", "did you mean 'epoch_ms'?"),
        ("epoch_ms = 10", "bogus = 10", "in [cluster]; `ziplog config show` lists all keys"),
        ("[[shard]]", "[[shards]]", "did you mean 'shard'?"),
        ('host = "localhost"', 'hots = "localhost"', "did you mean 'host'?"),
        ("epoch_ms = 10", "epoch_ms = 0", "epoch_ms in [cluster] is 0; it must be a whole number"),
        ("epoch_ms = 10", "epoch_ms = true", "1 to 60000 ms"),
        ("epoch_ms = 10", 'epoch_ms = "10"', "1 to 60000 ms"),
        ("insecure = false", "insecure = 0", "true or false"),
        ('durability = "memory"', 'durability = "ram"', "'memory' or 'disk'"),
        ('name = "demo"', 'name = "../x"', "letters, digits"),
        ('name = "demo"', "", "name is missing in [cluster]"),
        ("port = 7402", "port = 70000", "1 to 65535"),
        ("port = 7402", "port = 7401", "used more than once"),
        ('"shard-0-1"', '"shard-0-0"', "used more than once"),
        ("f = 1", "f = 2", "f + 1 = 3"),
        ("raft_port = 7401", "", "raft_port of node 'mms-0' is missing"),
        ("port = 7402", "port = 7402, raft_port = 9", "only [[mms]] and [[failure_handler]] nodes"),
        ("raft_port = 7405", "", "raft_port of node 'fh-0' is missing"),
        ("raft_port = 7405", "raft_port = 7405\narchive_port = 9", "only replicas of a [[shard]]"),
        ("port = 7402", "port = 7402, archive_port = 7401", "used more than once"),
        ("port = 7402", "port = 7402, archive_port = 0", "1 to 65535"),
        ("port = 7405", "port = 7402", "used more than once"),
        ("suspicion_ms = 1000", "suspicion_ms = 99", "100 to 60000 ms"),
        ("rtt_ms = 0", "rtt_ms = 1001", "0 to 1000 ms"),
        ("rtt_ms = 0", "rtt_ms = 251", "is 1000; it must be at least 4 x rtt_ms = 1004"),
        ('host = "localhost"', 'host = "10.0.0.1"', "insecure = true"),
        ('host = "localhost"', 'host = "a b"', "a host name or an IPv4 address"),
        ("[[mms]]", "[[failure_handler]]", "[[mms]]"),
        ("[cluster]", "[cluster", "TOML"),
        ("[cluster]", f"[cluster]\nf = {'1' * 5000}", "TOML"),
        ("insecure = false", 'raft_password = "short"', "16 to 256 characters"),
    ],
)
def test_the_wrong_key_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = dump(example())
    changed = text.replace(old, new, 1)
    assert changed != text
    path = write(tmp_path, changed)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_password_is_never_shown(tmp_path: Path) -> None:
    secret = "hunter2"
    path = write(
        tmp_path, dump(example()).replace("[[mms]]", f'raft_password = "{secret}"\n[[mms]]', 1)
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert secret not in str(caught.value)
    assert secret not in repr(example(raft_password=secret * 4))


def test_a_password_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, dump(example(raft_password="x" * 16)))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="0600"):
        load(path)


def test_a_routable_address_needs_insecure_and_a_password() -> None:
    node = NodeConfig("mms-0", "10.0.0.1", 7400, 7401)
    with pytest.raises(ConfigError, match="insecure"):
        example(mms=(node,))
    with pytest.raises(ConfigError, match="raft_password"):
        example(mms=(node,), insecure=True)
    assert example(mms=(node,), insecure=True, raft_password="x" * 16).mms == (node,)


def test_other_nodes_connect_to_the_advertised_host() -> None:
    node = NodeConfig("mms-0", "127.0.0.1", 7400, 7401, advertise_host="localhost")
    assert (node.bind, node.endpoint) == ("127.0.0.1:7400", "localhost:7400")
    assert node.raft_endpoint == "localhost:7401"
    assert example(mms=(node,)).bootstrap == "localhost:7400"


def test_an_advertised_host_is_exposed_like_a_host() -> None:
    node = NodeConfig("mms-0", "127.0.0.1", 7400, 7401, advertise_host="10.0.0.1")
    with pytest.raises(ConfigError, match=r"'10\.0\.0\.1'.* insecure"):
        example(mms=(node,))


def test_two_nodes_never_advertise_one_address() -> None:
    nodes = tuple(
        NodeConfig(f"m{i}", f"127.0.0.{i}", 100, 200, advertise_host="localhost") for i in (1, 2, 3)
    )
    with pytest.raises(ConfigError, match="localhost:100"):
        example(mms=nodes)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_an_even_number_of_membership_nodes_is_refused(count: int) -> None:
    nodes = tuple(NodeConfig(f"m{i}", "127.0.0.1", 100 + i, 200 + i) for i in range(count))
    with pytest.raises(ConfigError, match="1, 3 or 5"):
        example(mms=nodes)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_an_even_number_of_failure_handlers_is_refused(count: int) -> None:
    nodes = tuple(NodeConfig(f"h{i}", "127.0.0.1", 100 + i, 200 + i) for i in range(count))
    with pytest.raises(ConfigError, match="0, 1, 3 or 5"):
        example(failure_handlers=nodes)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.toml"):
        load(tmp_path / "nothing.toml")


def test_nodes_are_found_by_name() -> None:
    config = example()
    assert config.node("shard-0-1").endpoint == "localhost:7403"
    assert config.shard_of("shard-0-1") == (config.shards[0], 1)
    assert config.bootstrap == "127.0.0.1:7400"
    for find in (config.node, config.shard_of):
        with pytest.raises(ConfigError, match="shard-0-0"):
            find("shard-9-9")


@pytest.mark.parametrize(
    ("host", "is_so"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("localhost", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("[::]", False),
        ("a.example", False),
        ("*", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, is_so: bool) -> None:
    assert is_loopback(host) is is_so
