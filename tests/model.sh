#!/bin/sh
# Checks docs/model/slot.pml: every configuration holds, and every mistake in it is found.
# Leaves nothing behind. `tests/model.sh CONFIGURATION [MISTAKE]` runs one, and shows the steps that
# lead to its error, if it has one.
set -eu

model=$(cd "$(dirname "$0")/../docs/model" && pwd)/slot.pml
for tool in spin gcc; do
  command -v $tool >/dev/null && continue
  echo "make model: $tool is missing; 'apt-get install spin gcc' installs both" >&2
  exit 1
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
cd "$work"

# Builds and runs the checker: search KIND CONFIGURATION [MISTAKE]; its report is left in `report`.
search() {
  kind=$1 configuration=$2 mistake=${3:-}
  rm -f pan* report slot.trail
  cp "$model" slot
  spin -a -D"$configuration" ${mistake:+-D"$mistake"} slot >report 2>&1 || { cat report; exit 1; }
  case $kind in
    safety) options=-DSAFETY flags= ;;
    cycles) options=-DNP flags=-l ;;
  esac
  optimize=-O1
  [ -z "$mistake" ] || optimize=-O0  # the error comes soon
  gcc $optimize -w $options -DNOFAIR -DMEMLIM=4096 -o pan pan.c
  ./pan $flags -m10000 -w22 >report 2>&1 || true
}

states() { sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' report; }
complete() {
  grep -q 'errors: 0$' report && ! grep -q 'not completed\|too small\|out of memory\|aborting' report
}
why() { sed -n 's/^pan:1: \(.*\) (at depth.*/\1/p' report; }

failed=0
holds() {
  search "$@"
  if complete; then
    printf '  %-7s %-9s %9s states\n' "$1" "$2" "$(states)"
  else
    printf '  %-7s %-9s FAILS: %s\n' "$1" "$2" "$(why)"
    grep 'not completed\|too small\|out of memory\|aborting' report || true
    failed=1
  fi
}
found() {
  search safety "$1" "$2"
  if why | grep -q 'assertion violated\|invalid end state' ; then
    printf '  %-26s in %-9s %s\n' "$2" "$1" "$(why | cut -c 1-50)"
  else
    printf '  %-26s in %-9s NOT FOUND\n' "$2" "$1"
    failed=1
  fi
}

if [ $# -gt 0 ]; then
  search safety "$@"
  cat report
  [ -f slot.trail ] && spin -t -p -D"$1" ${2:+-D"$2"} slot
  complete
  exit
fi

echo 'must hold, at the end of every run:'
for configuration in PUBLISH CROWD TWO LANES1 ATTACH REUSE HANDOVER STALE CALLBACK; do
  holds safety $configuration
done
echo 'must come to an end:'
for configuration in LANES1 STALE CALLBACK; do
  holds cycles $configuration
done

echo 'mistakes that must be found:'
found PUBLISH BUG_RING_BEFORE_WORD
found PUBLISH BUG_WAITERS_BEFORE_WORD
found PUBLISH BUG_PUBLISH_BEFORE_VALUE
found PUBLISH BUG_ARM_AFTER_LOOK
found PUBLISH BUG_BELL_READ_LATE
found PUBLISH BUG_LEAVE_SILENT
found PUBLISH BUG_LEAVE_LOOKS_FIRST
found PUBLISH BUG_TAKE_UNCHECKED
found PUBLISH BUG_COMPLETE_SILENT
found PUBLISH BUG_DEATH_IGNORES_READY
found PUBLISH BUG_DROP_SILENT
found PUBLISH BUG_DROP_UNRECORDED
found CROWD BUG_WAKE_ONE
found TWO BUG_SUMMARY_BEFORE_READY
found TWO BUG_DEATH_KEEPS_CLAIM
found TWO BUG_GIVE_BACK_LAST
found ATTACH BUG_DISARM_BEFORE_WRITE
found HANDOVER BUG_HANDED_OVER_FIRST
found HANDOVER BUG_HANDED_OVER_LAST
found HANDOVER BUG_HANDOVER_COUNTED_FIRST
found STALE BUG_HOLD_BEFORE_LOOK
found STALE BUG_HELD_GOES_BACK
found STALE BUG_CLAIM_ANY_GENERATION
found REUSE BUG_ALLOCATE_RESETS_WAITERS
found CALLBACK BUG_BIT_CLEARED_LATE
found CALLBACK BUG_COMPLETE_BEFORE_LEAVE
exit $failed
