"""``fl-lightning completion SHELL``: a script that completes commands, options and names.

The script is made once from the parsers and the package's exports, so that a completion takes no time.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from fl_lightning.errors import FederationError

SHELLS = ("bash", "zsh")
HELP = """usage: fl-lightning completion {bash,zsh}

Prints a script that completes commands, options and names:
  bash:  source <(fl-lightning completion bash)
  zsh:   source <(fl-lightning completion zsh)
Add the line to ~/.bashrc or ~/.zshrc to make it permanent."""


def main(argv: list[str]) -> None:
    """Print the script for the shell that ``argv`` names."""
    shells = argv[1:]
    if not shells or shells[0] in ("-h", "--help"):
        print(HELP)
        return
    if shells[0] not in SHELLS:
        raise FederationError(f"There is no completion for {shells[0]!r}: choose {' or '.join(SHELLS)}.")
    print(script(shells[0]))


def script(shell: str) -> str:
    """The completion script."""
    from fl_lightning.cli.commands import COMMANDS

    choices = _choices()
    cases = [f"    {command}) words={_quoted(_options(command, choices))} ;;" for command in COMMANDS]
    values = [f"    {option}) words={_quoted(sorted(names))} ;;" for option, names in choices.items()]
    lines = [
        *(["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []),
        "_fl_lightning() {",
        '  local words="" current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        "  COMPREPLY=()",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f"    words={_quoted([*COMMANDS, '--help', '--version'])}",
        "  else",
        '    case "$previous" in',
        *values,
        "    esac",
        '    if [ -z "$words" ]; then case "${COMP_WORDS[1]}" in',
        *cases,
        "    esac; fi",
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _fl_lightning fl-lightning",
    ]
    return "\n".join(lines)


def _choices() -> dict[str, list[str]]:
    """Options that take a name, and their names."""
    from fl_lightning.cli import lists, names, parsing

    found = {f"--{option}": parsing.names(base) for option, (_, base) in parsing.CHOICES.items()}
    nested = {"--model.net": found.pop("--net"), "--data.partition": found.pop("--partition")}
    return {**found, **nested, "--config": list(names.packaged()), "reproduce": list(lists.tables())}


def _options(command: str, choices: dict[str, list[str]]) -> list[str]:
    """The options of a command."""
    from fl_lightning.cli.commands import COMMANDS

    module = importlib.import_module(COMMANDS[command].module)
    if COMMANDS[command].module == COMMANDS["fit"].module:
        return sorted({*_lightning(command), *_class_options("--model", choices), *_class_options("--data", choices)})
    if command == "completion":
        return list(SHELLS)
    if not hasattr(module, "build_parser"):
        return ["--help"]
    found = _strings(module.build_parser())
    return sorted({*found, *(_class_options("--data", choices) if command == "partition" else [])})


def _lightning(command: str) -> list[str]:
    from fl_lightning.cli.lightning import FederatedCLI

    class Stop(Exception):  # noqa: N818 - not an error
        pass

    class Parser(FederatedCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            raise Stop(parser)

    try:
        Parser(args=[command])
    except Stop as stop:
        parser: Any = stop.args[0]
        return _strings(parser._subcommands_action._name_parser_map[command])
    return []


def _strings(parser: Any) -> list[str]:
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    return [text for action in shown for text in action.option_strings if text.startswith("--")]


def _class_options(option: str, choices: dict[str, list[str]]) -> list[str]:
    """Arguments of all classes that an option accepts."""
    from fl_lightning.arguments import parameters
    from fl_lightning.cli.parsing import CHOICES, known

    base = CHOICES[option.removeprefix("--")][1]
    return [f"{option}.{name}" for kind in [*known(base), base] for name in parameters(kind)]


def _quoted(words: list[str]) -> str:
    return '"' + " ".join(words) + '"'
