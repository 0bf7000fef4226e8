# SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
"""A recipe for Spack. Copy this folder to packages/udrv of a Spack repository, and set `git` to where the sources are."""

from spack.package import *

try:
    # Spack 1.0 and newer; before, spack.package has it.
    from spack_repo.builtin.build_systems.generic import Package
except ImportError:
    pass


class Udrv(Package):
    """A libfabric provider for shared memory, IP networks and RDMA devices."""

    git = "file:///path/to/udrv"

    license("BSD-2-Clause OR GPL-2.0-only")

    version("main", branch="main")

    depends_on("c", type="build")
    depends_on("rust@1.85:", type="build")
    depends_on("libfabric@1.17:", type="run")

    def install(self, spec, prefix):
        # The folder is fixed: what this libfabric was compiled to look into is in its own prefix.
        Executable("scripts/install")("--prefix", prefix, "--provider-folder", prefix.lib.libfabric)

    def setup_run_environment(self, env):
        env.set("FI_PROVIDER_PATH", self.prefix.lib.libfabric)
        env.set("FI_PROVIDER", "udrv")
