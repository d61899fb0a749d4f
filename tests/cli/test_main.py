"""The command line as a user and a script see it: what it prints, and its exit codes."""

import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sglang_kvtc import __version__
from sglang_kvtc.cli import main as cli
from sglang_kvtc.errors import ConfigError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A command `probe` whose `run` each test replaces."""
    module = SimpleNamespace(
        add_arguments=lambda parser: parser.add_argument("--tokens", type=int, default=1), run=lambda args: 0
    )
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("probe_module", "a command for tests", "demo"))
    monkeypatch.setitem(sys.modules, "probe_module", module)
    level = logging.getLogger("sglang_kvtc").level
    yield module
    logging.getLogger("sglang_kvtc").setLevel(level)


def test_help_names_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name, row in cli.COMMANDS.items():
        assert f"{name} " in text
        assert row.help in text


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"sglang-kvtc {__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["no-such-command"], ["probe", "--no-such-option"], ["probe", "--tokens", "many"]]
)
@pytest.mark.usefixtures("command")
def test_bad_usage_is_exit_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_of_the_table_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"sglang-kvtc {name}" in capsys.readouterr().out


def test_a_command_gets_its_arguments_and_gives_the_exit_code(command: SimpleNamespace) -> None:
    seen: list[tuple[int, bool]] = []
    command.run = lambda args: seen.append((args.tokens, args.verbose)) or 0
    assert cli.main(["probe", "--tokens", "7"]) == 0
    assert cli.main(["-v", "probe"]) == 0
    assert cli.main(["probe", "-v"]) == 0
    assert seen == [(7, False), (1, True), (1, True)]


def test_an_expected_error_is_one_sentence_and_exit_code_1(
    command: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: object) -> int:
        raise ConfigError("target_ratio is 0.5; give 1 or more")

    command.run = refuse
    assert cli.main(["probe"]) == 1
    streams = capsys.readouterr()
    assert streams.err == "sglang-kvtc: target_ratio is 0.5; give 1 or more\n"
    assert streams.out == ""


def test_verbose_adds_the_traceback_of_an_expected_error(
    command: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(args: object) -> int:
        raise ConfigError("target_ratio is 0.5; give 1 or more")

    command.run = refuse
    assert cli.main(["probe", "-v"]) == 1
    assert "in refuse" in caplog.text
    caplog.clear()
    assert cli.main(["probe"]) == 1
    assert caplog.text == ""


def test_a_bug_is_not_disguised_as_an_expected_error(command: SimpleNamespace) -> None:
    command.run = lambda args: 1 // 0
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_a_terminated_command_leaves_its_contexts_like_an_interrupted_one(
    command: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[bool] = []

    def run(args: object) -> int:
        with contextlib.ExitStack() as servers:
            servers.callback(left.append, True)
            signal.raise_signal(signal.SIGTERM)
            time.sleep(30)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    command.run = run
    assert cli.main(["probe"]) == 1
    assert left == [True]
    assert capsys.readouterr().err == "sglang-kvtc: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_missing_package_names_the_extra_that_installs_it(
    command: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_it(args: object) -> int:
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    command.run = import_it
    assert cli.main(["probe"]) == 1
    assert "gguf: pip install 'sglang-kvtc[demo]'" in capsys.readouterr().err


def test_the_command_line_starts_without_torch_and_sglang() -> None:
    code = "import sys, sglang_kvtc.cli.main; sys.exit(bool({'torch', 'sglang'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
