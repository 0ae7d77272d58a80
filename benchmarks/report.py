"""Renders what run.py measured: the README's block, REPORT.md and charts in each card's folder.

    python benchmarks/report.py            writes them; without matplotlib, all but the charts
    python benchmarks/report.py --check    exit code 1 where README or report and results disagree

Needs neither a GPU nor PyTorch.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import full_report, results  # noqa: E402
from benchmarks.tables import Card, load_card, readme_block  # noqa: E402

START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
REPORT = "REPORT.md"


def find_cards(folder: Path) -> list[Card]:
    """Every folder below that holds results, by name."""
    paths = sorted(folder.glob(f"*/{results.RESULTS}")) if folder.is_dir() else []
    return [load_card(path.parent) for path in paths]


def block_of(readme: str) -> str | None:
    """The text between the markers; None without them."""
    if START not in readme or END not in readme:
        return None
    return readme.split(START, 1)[1].split(END, 1)[0].strip()


def with_block(readme: str, block: str) -> str:
    """The README with that text between its markers."""
    if block_of(readme) is None:
        raise ValueError(f"README: expected the markers {START} and {END}, got none. Add them.")
    head, rest = readme.split(START, 1)
    return f"{head}{START}\n{block}\n{END}{rest.split(END, 1)[1]}"


def problems(readme: str | None, cards: list[Card]) -> list[str]:
    """What README and reports say that the results do not; empty if all agree."""
    block = None if readme is None else block_of(readme)
    if not cards:
        if block and re.search(r"\d", block):
            return ["README: expected no numbers between its markers without results, got some. Remove them."]
        return []
    found = []
    if block is None:
        found.append(f"README: expected the results between {START} and {END}, got no such markers.")
    elif block != readme_block(cards).strip():
        found.append("README: expected the block of the results, got another. Run benchmarks/report.py.")
    for card in cards:
        path = card.folder / REPORT
        text = path.read_text(encoding="utf-8") if path.exists() else None
        if text != full_report.render(card):
            found.append(
                f"{card.folder.name}/{REPORT}: expected the report of the results, got "
                f"{'none' if text is None else 'another'}. Run benchmarks/report.py."
            )
    return found


def write(readme: Path, cards: list[Card], charts: bool) -> None:
    """Charts first: the report shows those that exist."""
    for card in cards:
        if charts:
            try:
                from benchmarks.charts import draw
            except ImportError as error:
                print(f"no charts: {error}", file=sys.stderr)
            else:
                draw(card)
        (card.folder / REPORT).write_text(full_report.render(card), encoding="utf-8")
    if cards and readme.exists():
        text = with_block(readme.read_text(encoding="utf-8"), readme_block(cards))
        readme.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--no-charts", action="store_true")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args(arguments)
    cards = find_cards(options.results)
    if options.check:
        readme = options.readme.read_text(encoding="utf-8") if options.readme.exists() else None
        found = problems(readme, cards)
        for problem in found:
            print(problem, file=sys.stderr)
        return 1 if found else 0
    try:
        write(options.readme, cards, not options.no_charts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(cards)} card{'' if len(cards) == 1 else 's'} rendered")
    return 0


if __name__ == "__main__":
    sys.exit(main())
