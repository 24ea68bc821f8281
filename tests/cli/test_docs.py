"""docs/cli.md is what the program says of itself."""

from workbench.cli_page import PAGE, commands, generated, written


def test_every_command_has_its_part() -> None:
    assert sorted(generated(PAGE.read_text(encoding="utf-8"))) == sorted(commands())


def test_the_page_is_what_the_program_would_write() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "run: python -m workbench.cli_page"
