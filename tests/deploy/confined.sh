# Runs a command as a container would: as process 1, as user 10001 without rights, on a root that is read-only.
#
#     unshare --mount --pid --fork --mount-proc --propagation private bash confined.sh FOLDER READ COMMAND...
#
# FOLDER stays writable. READ is a list of folders, joined by colons, that the user must be able to read: where a folder
# above one is closed to others, an empty one stands in its place, with folders of READ alone in it.
set -eu
[ $$ = 1 ] || { echo "not in a namespace of its own: all of this machine would become read-only" >&2; exit 1; }
folder=$1
readarray -t read < <(tr : '\n' <<<"$2" | sort)
shift 2
closed=()
for path in "${read[@]}"; do
    above=$path highest=
    while above=$(dirname "$above"); [ "$above" != / ]; do
        case $(stat -c %A "$above") in *[xt]) ;; *) highest=$above ;; esac
    done
    [ -z "$highest" ] || closed+=("$highest")
done
if [ ${#closed[@]} -gt 0 ]; then
    aside=$(mktemp -d)
    mount -t tmpfs tmpfs "$aside"
    for place in "${!read[@]}"; do
        mkdir "$aside/$place"
        mount --bind "${read[place]}" "$aside/$place"
    done
    for above in $(printf '%s\n' "${closed[@]}" | sort -u); do
        mount -t tmpfs -o mode=755 tmpfs "$above"
    done
    for place in "${!read[@]}"; do
        mkdir -p "${read[place]}"
        mount --bind "$aside/$place" "${read[place]}"
    done
    umount --recursive "$aside"
    rmdir "$aside"
fi
mount --bind "$folder" "$folder"
findmnt --raw --noheadings --output TARGET | while read -r target; do
    case $target in
    /proc | /proc/* | /sys | /sys/* | /dev | /dev/* | "$folder") ;;
    *) mount -o remount,bind,ro "$target" ;;
    esac
done
cd "$folder"
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all "$@"
