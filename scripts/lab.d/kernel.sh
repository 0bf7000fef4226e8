# shellcheck shell=bash disable=SC2154
# Sourced by scripts/deps, never run: the kernel of the guests of scripts/lab rdma.

# guest_kernel: the kernel of Debian 13, unpacked and not installed: target/guest/vmlinux, its modules, and those that a
# guest needs before it can mount anything (base.cpio). An empty folder target/guest brings the newest one. It is not that
# of Debian 12: soft-RoCE of Linux 6.1 may stand still for good when a link goes down (man/fi_udrv.7, FI_UDRV_RDMA_READ).
guest_kernel() {
    local dir=$TARGET/guest new=$TARGET/guest/.new package version image sectors offset length list=() options
    # A first word that changes with what is done here.
    local stamp=4
    [ "$(cut -d' ' -f1 "$dir/.holds" 2>/dev/null)" != "$stamp" ] || return 0
    rm -rf "$new"
    mkdir -p "$new"
    debian_apt trixie deb || die "no packages of Debian 13: see $LOGS/apt.log"
    package=$(apt-cache "${options[@]}" depends linux-image-amd64 | awk '/Depends: linux-image-[0-9]/ { print $2; exit }')
    [ -n "$package" ] || die "apt has no linux-image-amd64"
    note "deps: apt-get download $package"
    (cd "$new" && apt-get "${options[@]}" download "$package" >>"$LOGS/apt.log" 2>&1) || die "cannot download $package: see $LOGS/apt.log"
    version=${package#linux-image-}
    # What guests have: no disk, no screen, two kinds of network.
    dpkg-deb --fsys-tarfile "$new/$package"_*.deb | tar -C "$new" -x --wildcards \
        './boot/vmlinuz-*' '*/modules/*/modules.*' '*/modules/*/kernel/arch' '*/modules/*/kernel/crypto' \
        '*/modules/*/kernel/lib' '*/modules/*/kernel/mm' '*/modules/*/kernel/net' '*/modules/*/kernel/fs' \
        '*/modules/*/kernel/drivers/infiniband' '*/modules/*/kernel/drivers/virtio' '*/modules/*/kernel/drivers/char' \
        '*/modules/*/kernel/drivers/net/*.ko*'
    rm "$new/$package"_*.deb
    [ -d "$new/lib" ] || mv "$new/usr/lib" "$new/lib"
    PATH=$PATH:/sbin:/usr/sbin
    depmod -b "$new" "$version"

    # The emulated processor would take seconds to unpack it. The header's fields: linux/Documentation/x86/boot.rst.
    image=$new/boot/vmlinuz-$version
    sectors=$(od -An -tu1 -j 497 -N 1 "$image") offset=$(od -An -tu4 -j 584 -N 4 "$image") length=$(od -An -tu4 -j 588 -N 4 "$image")
    dd if="$image" of="$new/packed" bs=1M iflag=skip_bytes,count_bytes skip=$(((sectors + 1) * 512 + offset)) \
        count=$((length - 4)) status=none
    case $(od -An -tx1 -N 4 "$new/packed") in
        " fd 37 7a 58") xz -dc "$new/packed" >"$new/vmlinux" ;;
        " 28 b5 2f fd") apt_install zstd; zstd -dqc "$new/packed" >"$new/vmlinux" ;;
        *) cp "$image" "$new/vmlinux" ;;
    esac
    rm -r "$new/packed" "$new/boot"

    mkdir -p "$new/base/bin" "$new/base/modules"
    cp /bin/busybox "$new/base/bin/"
    local module file to n=100
    for module in virtio_pci 9pnet_virtio 9p overlay virtio_console virtio_net veth rdma_rxe rdma_ucm; do
        while read -r _ file _; do
            [[ " ${list[*]} " != *" $file "* ]] || continue
            list+=("$file") n=$((n + 1))
            to=$new/base/modules/$n-$(basename "${file%.ko*}").ko
            case $file in
                *.xz) xz -dc "$file" >"$to" ;;
                *.zst) apt_install zstd; zstd -dqc "$file" >"$to" ;;
                *) cp "$file" "$to" ;;
            esac
        done < <(modprobe -d "$new" -S "$version" -D "$module" | grep ^insmod)
    done
    [ "$n" -gt 110 ] || die "$package: no modules for the start of a guest"
    (cd "$new/base" && find . | busybox cpio -o -H newc 2>/dev/null) >"$new/base.cpio"
    rm -r "$new/base"
    printf '%s %s' "$stamp" "$version" >"$new/.holds"
    # Guests that run have the old one open.
    rm -rf "$dir/vmlinux" "$dir/base.cpio" "$dir/lib" "$dir/.holds"
    mv "$new/vmlinux" "$new/base.cpio" "$new/lib" "$dir/"
    mv "$new/.holds" "$dir/"
    rm -r "$new"
}
