#!/usr/bin/env python3
"""scripts/bench.d/instructions.py PEER BYTES ROUNDS FILE...

Reads what callgrind has left of one run of bench/instructions.c. A line for each end of a message and each owner of
instructions: BYTES, send or receive, PEER, provider or mpi or rest, and how many a message took.
"""

import collections
import os
import re
import sys

PROVIDERS = re.compile(r"lib(udrv|shm|psm3|tcp|sockets|rxm|verbs|efa|mlx)[-.0-9]*fi\.so")
MPIS = re.compile(r"lib(mpi|mpich|open-pal|open-rte|pmix|event|fabric_mpi)")
NAMED = re.compile(r"(c?ob|c?fn)=\((\d+)\)(?: (.*))?$")


def costs(path):
    """Instructions of each object, and the functions that have any. Lines after `calls=` are the callee's, again."""
    names, cost, functions = {}, collections.Counter(), set()
    owner = function = ""
    skip = False
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            named = NAMED.match(line)
            if named:
                kind, number, name = named.groups()
                table = kind[-2:]
                if name:
                    names[table, number] = name
                if kind == "ob":
                    owner = names[table, number]
                elif kind == "fn":
                    function = names[table, number]
            elif line.startswith("calls="):
                skip = True
            elif re.match(r"[-+*\d]", line):
                if not skip:
                    cost[owner] += int(line.split()[1])
                    functions.add(function)
                skip = False
    return cost, functions


def owner_of(path):
    name = os.path.basename(path)
    if PROVIDERS.match(name):
        return "provider"
    return "mpi" if MPIS.match(name) else "rest"


def main():
    peer, size, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ends = set()
    for path in sys.argv[4:]:
        cost, functions = costs(path)
        for end in ("send", "receive"):
            if f"counted_{end}" not in functions:
                continue
            ends.add(end)
            whose = collections.Counter()
            for name, count in cost.items():
                # What the program itself does counts for nobody.
                if os.path.basename(os.path.dirname(name)) != "programs":
                    whose[owner_of(name)] += count
            for owner, count in whose.items():
                print(size, end, peer, owner, round(count / rounds, 1), sep="\t")
    if ends != {"send", "receive"}:
        sys.exit(f"no counts of {'both ends' if not ends else 'one end'}")


main()
