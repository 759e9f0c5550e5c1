#!/bin/sh
# Runs a command on a kernel of Debian with cgroup v2, in this directory, on any machine: in a virtual machine that QEMU
# emulates (VM_ACCEL=kvm is faster, where it works). Its file system is this machine's, read-only, with a layer of memory
# above it. The exit code is the command's.
#
#     tools/cgroup2_vm.sh .venv/bin/python -m pytest -m limits
#
# Kernel and QEMU come from Debian's packages. The kernel is unpacked into .venv/cgroup2-vm and never installed.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
cache=$(pwd)/.venv/cgroup2-vm
as_root=""
[ "$(id -u)" -eq 0 ] || as_root="sudo"
mkdir -p "$cache"
if ! command -v qemu-system-x86_64 >/dev/null || ! command -v busybox >/dev/null || ! command -v cpio >/dev/null; then
    $as_root apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $as_root apt-get -o DPkg::Lock::Timeout=600 install -y -qq --no-install-recommends \
        qemu-system-x86 busybox-static cpio
fi
if ! [ -e "$cache/kernel" ]; then
    package=$(apt-cache depends linux-image-amd64 | awk '$1 == "Depends:" { print $2; exit }')
    [ -n "$package" ] || { $as_root apt-get update -qq && exec "$0" "$@"; }
    (cd "$cache" && apt-get download -qq "$package")
    dpkg-deb -x "$cache/$package"_*.deb "$cache/unpacked"
    mkdir -p "$cache/first/bin"
    for module in drivers/virtio/virtio_ring drivers/virtio/virtio drivers/virtio/virtio_pci_modern_dev \
        drivers/virtio/virtio_pci_legacy_dev drivers/virtio/virtio_pci fs/netfs/netfs fs/fscache/fscache \
        net/9p/9pnet net/9p/9pnet_virtio fs/9p/9p fs/overlayfs/overlay; do
        cp "$cache"/unpacked/lib/modules/*/kernel/$module.ko "$cache/first/"
        echo "insmod /${module##*/}.ko"
    done >"$cache/first/modules"
    cp "$(command -v busybox)" "$cache/first/bin/busybox"
    mv "$cache"/unpacked/boot/vmlinuz-* "$cache/kernel"
    rm -r "$cache/unpacked" "$cache"/*.deb
fi

command=""
for word; do command="$command '$(printf %s "$word" | sed "s/'/'\\\\''/g")'"; done
cat >"$cache/first/init" <<END
#!/bin/busybox sh
/bin/busybox --install -s /bin
mkdir -p /proc /dev /shared /layer /root
mount -t proc proc /proc
mount -t devtmpfs dev /dev
. /modules
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 shared /shared
mount -t tmpfs layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/shared,upperdir=/layer/upper,workdir=/layer/work overlay /root
mount -t proc proc /root/proc
mount -t sysfs sys /root/sys
mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/shm
mount -t tmpfs shm /root/dev/shm
mkdir /here
mount -o bind '/root$(pwd)' /here
mount -t tmpfs tmp /root/tmp
chmod 1777 /root/tmp
mkdir -p '/root$(pwd)' # gone if it is below /tmp
mount -o bind /here '/root$(pwd)'
mount -t cgroup2 cgroup2 /root/sys/fs/cgroup
chmod a+x /root/root /root/home/* # tests run programs below them as other users; this reaches the layer alone
ip link set lo up
cat >/root/tmp/command <<'COMMAND'
cd '$(pwd)' && $command
COMMAND
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp chroot /root /bin/sh /tmp/command
echo "exit code of the command: \$?"
poweroff -f
END
chmod 755 "$cache/first/init"
(cd "$cache/first" && find . | cpio --quiet -o -H newc | gzip) >"$cache/initramfs.$$"
trap 'rm -f "$cache/initramfs.$$" "$cache/output.$$"' EXIT
qemu-system-x86_64 -nodefaults -no-user-config -display none -serial stdio -no-reboot -accel "${VM_ACCEL:-tcg,thread=multi}" \
    -cpu max -smp 2 -m "${VM_MEMORY:-3G}" -kernel "$cache/kernel" -initrd "$cache/initramfs.$$" \
    -append "console=ttyS0 panic=-1 quiet" \
    -fsdev local,id=shared,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=shared,mount_tag=shared </dev/null | tr -d '\r' | tee "$cache/output.$$"
code=$(sed -n 's/^exit code of the command: //p' "$cache/output.$$" | tail -n 1)
exit "${code:-125}"
