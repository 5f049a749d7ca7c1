"""The entry point, the list of its verbs, and the reference page made from their help texts."""

import importlib
import importlib.util
import signal
from collections.abc import Mapping
from typing import Any

import click

from makespan import __version__
from makespan.cli.progress import quiet_option
from makespan.errors import MakespanError, bounded
from makespan.logs import divert_native_output
from makespan.units import printable

_WIDTH = 96
_ERRORS = 2  # file descriptor
_INTERRUPTED = 128 + signal.SIGINT  # as shells say it
_HEAD = """# Command line

Every verb answers `--help`; this page is generated from the answers. A mistake gives one message on the
error stream, exit status 2, and leaves no file behind. Exit status 1 means that the work was done and
the answer is no: a schedule is impossible, a bound is missed. A command that Ctrl-C interrupts ends with
status 130. No result replaces a file that its command reads. What solvers and other native libraries print
goes to the error stream.

Two options mean the same everywhere. `--json` prints the result as JSON, alone on the standard output.
`--quiet` shows no progress; reports on the input, warnings and errors remain on the error stream. Long
commands show what is done, what runs and the time that is left, in place in a terminal, as lines elsewhere.

In bash, `eval "$(makespan completion bash)"` completes commands, options and names of policies, workloads and
clusters. In zsh and fish, replace `bash` by `zsh` or `fish`.
"""
_TRY = """\
makespan simulates shared GPU clusters, and plans and trains models on them. Some commands to try:

  makespan simulate                                watch ten jobs on 64 GPUs
  makespan compare --policies sia,fifo --jobs 20   compare policies on one job list
  makespan explain llama7 244 8888                 break an iteration time down into terms
  makespan slapo show bert                         print the schedule of a model
  makespan easyscale run neumf --steps 50          train elastically

The last two need torch. 'makespan --help' lists all commands, 'makespan COMMAND --help' explains one."""
_EXTRAS = {"torch": "torch", "jinja2": "report", "PIL": "report", "plotly": "report"}
"""Extra of the package that brings a package which only some commands need."""
VERBS = {
    "simulate": ("makespan.cli.simulate:simulate_command", "Run a workload under a policy and watch it."),
    "compare": ("makespan.cli.simulate:compare_command", "Run a workload under several policies."),
    "jobs": ("makespan.cli.options:jobs_command", "Write the jobs of a workload as a list."),
    "policies": ("makespan.cli.lists:policies_command", "List the scheduling policies."),
    "clusters": ("makespan.cli.lists:clusters_command", "List the clusters of the catalogue."),
    "workloads": ("makespan.cli.lists:workloads_command", "List the workloads that jobs can train."),
    "claims": (
        "makespan.cli.lists:claims_command",
        "Print the statements of the papers with their verdicts.",
    ),
    "report": ("makespan.cli.report:report_command", "Write one HTML page on all available results."),
    "plan": (
        "makespan.cli.plan:plan_command",
        "Find the fastest layouts of a training run that fit into memory.",
    ),
    "size": (
        "makespan.cli.plan:size_command",
        "Say how many GPUs train a model in time and within a budget.",
    ),
    "validate-public": (
        "makespan.cli.plan:validate_public_command",
        "Judge predictions on tables of published rows, each source left out in turn.",
    ),
    "emulate": (
        "makespan.cli.emulator:emulate_command",
        "Write emulated traces, one per workload, or the predicted steps of your own model.",
    ),
    "explain": (
        "makespan.cli.emulator:explain_command",
        "Explain the iteration time of one point, term by term, and its memory.",
    ),
    "calibrate": (
        "makespan.cli.emulator:calibrate_command",
        "Fit the constants of the emulator to measured traces, or learn from steps of your own model.",
    ),
    "validate": (
        "makespan.cli.emulator:validate_command",
        "Compare the emulator, or predictions for your own model, with what was measured.",
    ),
    "profile": (
        "makespan.cli.live:profile_command",
        "Time small workloads under every plan on this machine, or steps of your own model.",
    ),
    "live": (
        "makespan.cli.live:live_command",
        "Predict how the jobs of a workload run under a policy, train them, and compare.",
    ),
    "completion": (
        "makespan.cli.options:completion_command",
        "Print the script that completes commands in a shell.",
    ),
    "config": (
        "makespan.config.command:config_command",
        "Check a configuration and print it with all defaults.",
    ),
    "easyscale": (
        "makespan.cli.easyscale:COMMANDS",
        "Train elastically: run a job, let processes join and leave it, export its model.",
    ),
    "oobleck": (
        "makespan.cli.oobleck:COMMANDS",
        "Profile layers, plan pipelines, train through the loss of nodes, "
        "and simulate systems that lose nodes.",
    ),
    "slapo": (
        "makespan.cli.slapo:COMMANDS",
        "Print schedules, verify them, and search for the best one.",
    ),
}
"""Module and attribute of each verb, and its help text of one line."""


class Failure(click.ClickException):
    """One message on the error stream and exit status 2."""

    exit_code = 2

    def format_message(self) -> str:
        """Return the message, with control characters escaped and bounded in length."""
        return printable(bounded(super().format_message()))


class LazyGroup(click.Group):
    """Group whose commands are imported on demand and whose expected errors become one message."""

    def __init__(self, verbs: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self.verbs = dict(verbs)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run as a program; native output is only diverted in ``standalone_mode``."""
        if kwargs.get("standalone_mode", True):
            divert_native_output(_ERRORS)
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order in which they were given."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if there is no such verb."""
        if cmd_name not in self.verbs:
            return None
        module, attribute = self.verbs[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        _add_quiet(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in self.verbs.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors that the package raises on purpose are shown without a traceback."""
        try:
            return super().invoke(ctx)
        except (click.Abort, KeyboardInterrupt):
            from makespan.cli.options import say

            say("Aborted!", err=True)
            raise click.exceptions.Exit(_INTERRUPTED) from None
        except MakespanError as error:
            raise Failure(str(error)) from None
        except click.UsageError as error:
            raise Failure(error.format_message()) from None
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            raise Failure(f"{error}; expected the extra {extra}: pip install 'makespan[{extra}]'") from None
        except BrokenPipeError:  # the reader closed the pipe; click ends quietly
            raise
        except OSError as error:
            raise Failure(f"{error.filename or 'file'}: {error.strerror or error}") from None


def _add_quiet(command: click.Command) -> None:
    """Give a command, or those of a group, the option ``--quiet`` unless it has it."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _add_quiet(inner)
    elif all("--quiet" not in parameter.opts for parameter in command.params):
        command.params.append(quiet_option())


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="For example: makespan simulate --workload naive; "
    "makespan compare --policies morphling-work,sia,fifo --workload base; "
    "makespan explain llama7 244 8888",
)
@click.version_option(__version__, prog_name="makespan")
def main() -> None:
    """Simulate shared GPU clusters, predict iteration times, and train models elastically and resiliently."""
    if click.get_current_context().invoked_subcommand is None:
        from makespan.cli.options import say

        say(_TRY)


def cli_page() -> str:
    """Return the reference page of the command line as Markdown."""
    root = click.Context(main, info_name="makespan", terminal_width=_WIDTH, **main.context_settings)
    parts = [_HEAD, _block(main.get_help(root))]
    return "\n".join([*parts, *_entries(main, root, "")])


def _entries(group: click.Group, context: click.Context, before: str) -> list[str]:
    """Return the entries of the commands of a group, and of those below them."""
    entries = []
    for verb in group.list_commands(context):
        command = group.get_command(context, verb)
        if command is not None:
            inner = click.Context(command, context, verb, terminal_width=_WIDTH)
            entries.append(f"## `{before}{verb}`\n\n{_block(command.get_help(inner))}")
            if isinstance(command, click.Group):
                entries += _entries(command, inner, f"{before}{verb} ")
    return entries


def _block(text: str) -> str:
    lines = (line.rstrip() for line in text.splitlines())
    return "```text\n" + "\n".join(lines) + "\n```\n"
