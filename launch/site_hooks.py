"""What MkDocs asks of this project: files outside docs/ become pages, capabilities get their table of pairs.

On a code host a link such as ../tests/dist/test_run.py leads into the tree; a site has no tree, so it shows
the file. Such pages stand in no navigation and in no search. Called by MkDocs alone (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from k3train.compatibility import FEATURES, exclusive, refusal

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".md": "markdown"}

CAPABILITIES = {
    "pipeline.md": ("pipeline", "virtual stages", "uneven cut"),
    "parallelism.md": ("data parallelism", "context parallelism", "expert parallelism", "ZeRO-1", "ZeRO-2"),
    "moonep.md": ("MoonEP",),
    "long_context.md": ("context parallelism",),
    "vision.md": ("vision", "vision recompute"),
    "offload.md": (
        "host activations",
        "peer activations",
        "nvme activations",
        "FP8 activations",
        "recompute",
    ),
    "quantisation.md": ("QAT", "BF16"),
    "training.md": ("AdamW", "Muon", "Per-Head Muon"),
}
"""Page -> the features that it is about. The site's page ends with their columns of the table of pairs."""


def outside(page: Path) -> list[str]:
    """Paths below the root that a page links to and docs/ does not hold."""
    found = (posixpath.normpath(f"docs/{match[1]}") for match in LINK.finditer(page.read_text()))
    return sorted({path for path in found if not path.startswith(("docs/", ".."))})


def source_page(path: str) -> str:
    """The page under `source/` that shows a file of the tree, or lists a folder."""
    return f"source/{path.replace('/', '.')}.md"


def shown(path: str) -> str:
    """A file or folder of the tree as Markdown."""
    target = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if target.is_dir():
        return head + "".join(f"- `{each.name}`\n" for each in sorted(target.iterdir()) if each.suffix)
    return f"{head}~~~~~{LANGUAGES.get(target.suffix, 'text')}\n{target.read_text().rstrip()}\n~~~~~\n"


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file of the tree that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in sorted({path for page in DOCS.glob("*.md") for path in outside(page)}):
        file = File.generated(config, source_page(path), content=shown(path))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ to those pages, and end a capability with its pairs."""
    if page.file.src_uri.startswith("source/"):
        return markdown

    def inside(match: re.Match[str]) -> str:
        return f"]({source_page(posixpath.normpath(f'docs/{match[1]}'))})"

    return LINK.sub(inside, markdown) + pairs(CAPABILITIES.get(page.file.src_uri, ()))


def pairs(features: tuple[str, ...]) -> str:
    """Whether each of the features works with every other one, and why not, as Markdown; "" for none."""
    if not features:
        return ""
    lines = [f"| | {' | '.join(features)} |", "|---" * (len(features) + 1) + "|"]
    for feature in FEATURES:
        cells = [_cell(feature.name, own) for own in features]
        lines.append(f"| **{feature.name}** | {' | '.join(cells)} |")
    return "\n\n## With each other feature\n\n" + "\n".join(lines) + "\n"


def _cell(feature: str, own: str) -> str:
    if feature == own or exclusive(feature, own):
        return "-"
    entry = refusal(feature, own)
    return "yes" if entry is None else f"no: {entry.why}"
