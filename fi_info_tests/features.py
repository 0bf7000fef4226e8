#!/usr/bin/env python3
"""features.py FEATURES.md LIBFABRIC

Compares the second column of FEATURES.md with what `fi_info -v` printed (standard input). One line a row that is wrong,
then the count of what was compared. LIBFABRIC is the library whose fi_info it was: what it cannot print at all would
be absent whatever the provider offers.
"""
import re
import sys

# `caps: FI_MSG, no FI_HMEM`, `tx_attr.inject_size: 16384`
ITEM = re.compile(r"`((?:\w+\.)?\w+): ([^`]+)`")


def infos(text):
    """Each fi_info as a dictionary: `caps`, or `tx_attr.caps` for a member of a structure."""
    found = []
    for line in text.splitlines():
        if line.startswith("fi_info:"):
            found.append({})
            prefix = ""
        if not found or (match := re.match(r"^( +)(\w+):(.*)$", line)) is None:
            continue
        depth, name, value = len(match[1]), match[2], match[3].strip()
        if depth == 4:
            prefix = ""
        if value == "":
            prefix = name.removeprefix("fi_") + "."
        else:
            found[-1][prefix + name] = value
    return found


def rows(page):
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and not set(cells[0]) <= set("-"):
            yield cells


def wrong(info, field, wanted, printable):
    """What does not fit, as a sentence; else nothing."""
    if field not in info:
        return f"there is no field {field}"
    shown = info[field]
    listed = [word.strip() for word in shown.strip("[] ").split(",") if word.strip()]
    if wanted == "none":
        return "" if shown.startswith("[") and not listed else f"{field} is {shown}"
    for word in (word.strip() for word in wanted.split(",")):
        absent, name = word.startswith("no "), word.removeprefix("no ")
        if absent and name.encode() not in printable:
            return f"this libfabric does not print {name}"
        if (name in listed) == absent:
            return f"{field} is {shown}, the page says: {word}"
    return ""


def main():
    page = open(sys.argv[1], encoding="utf-8").read()
    printable = open(sys.argv[2], "rb").read()
    found = infos(sys.stdin.read())
    compared = faults = 0
    for feature, shows, tests in rows(page):
        if feature == "feature":
            continue
        if "`" not in tests and "not offered" not in shows:
            print(f"{feature}: no test")
            faults += 1
        for field, wanted in ITEM.findall(shows):
            for info in found:
                compared += 1
                if fault := wrong(info, field, wanted, printable):
                    print(f"{feature}: {fault}")
                    faults += 1
    print(f"{compared} values compared, {faults} wrong")
    return faults > 0 or compared == 0


sys.exit(main())
