"""The answer of the gate for machines: JUnit XML, and annotations of GitHub."""

from pathlib import Path
from xml.etree import ElementTree

from oversmooth.output.whole_files import write_whole
from oversmooth.results import GateResult


def write_junit(result: GateResult, path: Path) -> None:
    """One test case per rule; a rule that is broken at several layers is one failure that names them all."""
    names = [*dict(result.rules), *dict.fromkeys(b.rule for b in result.breaches if b.rule not in dict(result.rules))]
    suite = ElementTree.Element("testsuite", name=f"oversmooth gate {result.target}", tests=str(len(names)))
    failed = 0
    for name in names:
        case = ElementTree.SubElement(suite, "testcase", classname="oversmooth.gate", name=name)
        words = [breach.words for breach in result.breaches if breach.rule == name]
        if words:
            failed += 1
            failure = ElementTree.SubElement(case, "failure", message=words[0])
            failure.text = "\n".join(words)
    suite.set("failures", str(failed))
    content = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    write_whole(path, lambda partial: partial.write_bytes(content))


def annotations(result: GateResult) -> list[str]:
    """Lines that GitHub shows beside a pull request."""
    return [f"::error title=oversmooth gate {_escaped(b.rule)}::{_escaped(b.words)}" for b in result.breaches]


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
