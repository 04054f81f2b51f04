"""Images with classes, to be told apart by their names alone."""

from pathlib import Path

from ..fingerprint import data_line
from ..towers.open_clip import import_open_clip
from .images import content_key, read_file
from .source import LARGEST_TEXT, Sample, Source, check_file, printable

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
TEMPLATES = (
    "a photo of a {}.",
    "a picture of the {}.",
    "a close-up of a {}.",
    "a small {} in the distance.",
    "a blurry image of a {}.",
    "a drawing of a {}.",
    "several {}.",
)


class ImageFolder(Source):
    """`folder/class/image.jpg`: classes are folders and images are files, both sorted by name.

    Args:
        classnames: A file with lines `folder<TAB>name` (folders that are not there are passed over), or with a name
            per line in the folders' order. "imagenet": open_clip's, of folders named by WordNet's id or by the number
            of the class. Default: the folders' names, with spaces for underscores.
        templates: A file with prompts, one per line, with {} for the class name; "imagenet" and "simple": open_clip's.
            Default: `TEMPLATES`.
    """

    def __init__(
        self, folder: str | Path, classnames: str | Path | None = None, templates: str | Path | None = None
    ) -> None:
        if not Path(folder).is_dir():
            raise ValueError(f"--zeroshot-data {folder}: must be a folder, with a folder per class in it.")
        folders = sorted(path for path in Path(folder).iterdir() if path.is_dir() and not path.name.startswith("."))
        if not folders:
            raise ValueError(f"--zeroshot-data {folder}: must have a folder per class, has none.")
        self._images: list[tuple[Path, int]] = []
        for number, path in enumerate(folders):
            images = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
            if not images:
                name = printable(str(path))
                raise ValueError(f"--zeroshot-data {name}: must have images ({', '.join(SUFFIXES)}), has none.")
            self._images += [(image, number) for image in images]
        self.classnames = _class_names([path.name for path in folders], classnames)
        self.templates = list(TEMPLATES) if templates is None else read_templates(templates)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        path, number = self._images[index]
        data = read_file(path)
        return Sample(self.classnames[number], content_key(data), data, rgb_first=True, label=number)

    def name(self, index: int) -> str:
        return printable(str(self._images[index][0]))

    def fingerprint(self) -> list[str]:
        return [data_line("classes", len(self), self.classnames, [path.name for path, _ in self._images])]


def read_templates(path: str | Path) -> list[str]:
    """Prompts, one per line, with {} for the class name; or open_clip's, by name."""
    if path in ("imagenet", "simple"):
        metadata = import_open_clip().zero_shot_metadata
        makers = metadata.OPENAI_IMAGENET_TEMPLATES if path == "imagenet" else metadata.SIMPLE_IMAGENET_TEMPLATES
        return [make("{}") for make in makers]
    lines = _lines(path, "--templates")
    for number, line in lines.items():
        if line.count("{}") != 1:
            raise ValueError(f"--templates {path}: line {number} must contain {{}} once, got {line!r}.")
    return list(lines.values())


def _class_names(folders: list[str], classnames: str | Path | None) -> list[str]:
    if classnames is None:
        return [folder.replace("_", " ") for folder in folders]
    names = _of_imagenet() if classnames == "imagenet" else _of_file(Path(classnames), folders)
    if missing := [folder for folder in folders if folder not in names]:
        rule = "must name all folders (imagenet: n01440764 and the like)"
        raise ValueError(f"--classnames {classnames}: {rule}, lacks {len(missing)} such as {missing[0]!r}.")
    return [names[folder] for folder in folders]


def _of_imagenet() -> dict[str, str]:
    names = import_open_clip().zero_shot_metadata.IMAGENET_CLASSNAMES
    from timm.data import ImageNetInfo

    ids = ImageNetInfo().label_names()
    return dict(zip(ids, names, strict=True)) | {str(number): name for number, name in enumerate(names)}


def _of_file(path: Path, folders: list[str]) -> dict[str, str]:
    lines = _lines(path, "--classnames")
    if not any("\t" in line for line in lines.values()):
        if len(lines) != len(folders):
            raise ValueError(f"--classnames {path}: must have {len(folders)} names, one per folder, got {len(lines)}.")
        return dict(zip(folders, lines.values(), strict=True))
    names: dict[str, str] = {}
    for number, line in lines.items():
        folder, _, name = line.partition("\t")
        if not name.strip() or folder in names:
            rule = "must be 'folder<TAB>name', of another folder than before"
            raise ValueError(f"--classnames {path}: line {number} {rule}, got {line!r}.")
        names[folder] = name.strip()
    return names


def _lines(path: str | Path, flag: str) -> dict[int, str]:
    """The lines that are not empty, by their numbers."""
    check_file(Path(path), LARGEST_TEXT)
    lines = enumerate(Path(path).read_text(encoding="utf-8-sig").splitlines(), start=1)
    lines_with_text = {number: line.strip() for number, line in lines if line.strip()}
    if not lines_with_text:
        raise ValueError(f"{flag} {path}: must have at least one line, is empty.")
    return lines_with_text
