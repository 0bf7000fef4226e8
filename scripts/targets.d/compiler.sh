# shellcheck shell=bash disable=SC2154
# Sourced by scripts/deps, never run: the compiler of scripts/targets.

# target_compiler: Debian 13's rustc with the standard library for each processor of scripts/targets, unpacked and not
# installed: target/targets/rustc. A standard library is good for its own compiler only, and Debian has them for every
# processor it runs on. It is the oldest Rust that udrv may be built with, too. It runs with the C library that it was
# built for, which lies beside it.
target_compiler() {
    local dir=$TARGET/targets new=$TARGET/targets/.new machine host packages libraries options
    local stamp=1
    [ "$(cat "$dir/.holds" 2>/dev/null)" != "$stamp" ] || return 0
    machine=$(dpkg --print-architecture)
    # There it is native, or Debian's names for the loader and the folders are not those below.
    [ "$machine" = amd64 ] || die "the other processors are checked on x86-64"
    rm -rf "$dir"
    mkdir -p "$new/root"
    debian_apt trixie deb "$machine" arm64 riscv64 ppc64el || die "no packages of Debian 13: see $LOGS/apt.log"
    packages=(rustc libstd-rust-dev:arm64 libstd-rust-dev:riscv64 libstd-rust-dev:ppc64el)
    mapfile -t libraries < <(apt-cache "${options[@]}" depends --recurse --no-suggests --no-recommends --no-conflicts \
        --no-breaks --no-replaces --no-enhances libstd-rust-dev | grep '^[a-z]')
    [ ${#libraries[@]} -gt 5 ] || die "apt knows no libstd-rust-dev"
    note "deps: apt-get download ${packages[*]} (Debian 13)"
    (cd "$new" && apt-get "${options[@]}" download "${packages[@]}" "${libraries[@]}") >>"$LOGS/apt.log" 2>&1 ||
        die "cannot download a compiler for other processors: see $LOGS/apt.log"
    for package in "$new"/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -C "$new/root" -x --exclude='./usr/share' --exclude='./etc'
        rm "$package"
    done
    host=x86_64-linux-gnu
    cat >"$new/rustc" <<EOT
#!/bin/sh
root=\${0%/*}/root/usr
exec "\$root/lib64/ld-linux-x86-64.so.2" --library-path "\$root/lib/$host:\$root/lib" "\$root/bin/rustc" --sysroot "\$root" "\$@"
EOT
    chmod +x "$new/rustc"
    "$new/rustc" --version >>"$LOGS/apt.log" 2>&1 || die "Debian 13's rustc does not run here: see $LOGS/apt.log"
    mv "$new/root" "$new/rustc" "$dir/"
    rmdir "$new"
    printf '%s' "$stamp" >"$dir/.holds"
}
