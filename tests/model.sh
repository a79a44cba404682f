#!/bin/sh
# Checks the models in docs/model/: every configuration holds. Leaves nothing behind.
# `tests/model.sh --mistakes` shows that every mistake made in a model on purpose is found.
# `tests/model.sh --cycles` shows of every configuration that its states form no cycle.
# `tests/model.sh MODEL [MISTAKE]` runs one, and shows the steps that lead to its error, if it has
# one: MODEL is a configuration of slot.pml, in capitals, or another file's name.
set -eu

models=$(cd "$(dirname "$0")/../docs/model" && pwd)
self=$models/../../tests/$(basename "$0")

# Builds and runs the checker in this directory, for KIND MODEL [MISTAKE [OPTIONS]]: its
# report is `report`.
search() {
  kind=$1 model=$2 mistake=${3:-}
  case $model in
    *[A-Z]*) file=slot.pml ;;
    *) file=$model.pml ;;
  esac
  cp "$models/$file" model
  spin -a -D"$model" ${mistake:+-D"$mistake"} model >report 2>&1 || { cat report; exit 1; }
  # What is small, or found soon, is not worth an optimizer's time.
  case $kind in
    holds) options='-O1 -DSAFETY' flags=-w23 ;;
    small) options='-O0 -DSAFETY' flags= ;;
    ends) options='-O0 -DNP' flags=-l ;;
  esac
  gcc $options ${4:-} -w -DNOFAIR -DMEMLIM=4096 -o pan pan.c
  ./pan -w20 $flags -m10000 >report 2>&1 || true
}

states() { sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' report; }
complete() {
  grep -q 'errors: 0$' report && ! grep -q 'not completed\|too small\|out of memory\|aborting' report
}
why() { sed -n 's/^pan:1: \(.*\) (at depth.*/\1/p' report; }

# One check, in a directory of its own: HOW MODEL [MISTAKE [OPTIONS]]. Its line says that it failed by
# "FAILS".
check() {
  mkdir "$1.$2.${3:-}" && cd "$1.$2.${3:-}"
  if [ "$1" = found ]; then
    search small "$2" "$3" "${4:-}"
    if why | grep -q 'assertion violated\|invalid end state'; then
      printf '  %-26s in %-9s %s\n' "$3" "$2" "$(why | cut -c 1-50)"
    else
      printf '  %-26s in %-9s FAILS: it is not found\n' "$3" "$2"
    fi
  else
    search "$1" "$2"
    if complete; then
      printf '  %-36s %9s states%s\n' "$2" "$(states)" "$([ "$1" = ends ] && echo ', and no cycle')"
    else
      printf '  %-36s FAILS: %s\n' "$2" "$(why; grep 'not completed\|memory\|abort' report)"
    fi
  fi
  cd .. && rm -rf "./$1.$2.${3:-}"
}

if [ "${1:-}" = check ]; then  # as called from below
  shift
  check "$@"
  exit
fi
for tool in spin gcc; do
  command -v $tool >/dev/null && continue
  echo "make model: $tool is missing; 'apt-get install spin gcc' installs both" >&2
  exit 1
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
cd "$work"

case "${1:-}" in
  '' | --mistakes | --cycles) ;;
  *)
    search holds "$@"
    cat report
    [ -f model.trail ] && spin -t -p -D"$1" ${2:+-D"$2"} model
    complete
    exit
    ;;
esac

# The longest come first: as many run at a time as there are processors.
holding() {
  cat <<'END'
holds lookout
holds ask
holds blocks
holds listen
holds fork
holds REUSE
holds ATTACH
holds HANDOVER
small PUBLISH
small TWO
ends LANES1
ends STALE
small CROWD
small LANES1
small STALE
small RESERVED
small HOME
small CALLBACK
ends CALLBACK
END
}

cycles() {
  for model in lookout ask blocks listen REUSE ATTACH fork HANDOVER PUBLISH TWO CROWD RESERVED HOME; do
    echo "ends $model"
  done
}

# Some are found much sooner when the search goes the other way (-DREVERSE, -DT_REVERSE).
mistakes() {
  cat <<'END'
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
found TWO BUG_DEATH_KEEPS_CLAIM -DT_REVERSE
found TWO BUG_GIVE_BACK_LAST -DREVERSE
found ATTACH BUG_DISARM_BEFORE_WRITE -DT_REVERSE
found HANDOVER BUG_HANDED_OVER_FIRST
found HANDOVER BUG_HANDED_OVER_LAST
found HANDOVER BUG_HANDOVER_COUNTED_FIRST
found HANDOVER BUG_HANDOVER_IF_PENDING
found STALE BUG_HOLD_BEFORE_LOOK
found STALE BUG_HELD_GOES_BACK
found STALE BUG_CLAIM_ANY_GENERATION
found REUSE BUG_ALLOCATE_RESETS_WAITERS -DREVERSE
found CALLBACK BUG_BIT_CLEARED_LATE
found CALLBACK BUG_COMPLETE_BEFORE_LEAVE
found RESERVED BUG_ABANDON_SILENT
found RESERVED BUG_ABANDON_UNRECORDED
found HOME BUG_HOME_ABANDON_SILENT
found fork BUG_DEATH_IGNORES_FORKING
found fork BUG_GRACE_TOO_SHORT
found fork BUG_GRACE_FOR_EVER
found fork BUG_CLAIM_AFTER_FORK
found fork BUG_PARENT_GOES_ON
found fork BUG_PARENT_KEEPS_END
found fork BUG_FORKING_LATE
found fork BUG_FORKING_CLEARED_FIRST
found fork BUG_FORKING_STAYS
found fork BUG_UNCOUNTED -DT_REVERSE
found fork BUG_COUNTED_FIRST -DT_REVERSE
found fork BUG_ANNOUNCED_LAST
found fork BUG_CHILD_KEEPS_PIPE
found fork BUG_WATCHED_ONCE
found listen BUG_DELIVER_WAKES_NOBODY
found listen BUG_LOOK_WAKES_NOBODY -DT_REVERSE
found listen BUG_LOOK_IGNORES_FOUND
found listen BUG_NOBODY_LISTENS
found listen BUG_ALL_LEAVE
found listen BUG_WAKE_IF_ARMED
found listen BUG_LATE_BLOCKS
found blocks BUG_FREE_FOR_ALL
found blocks BUG_RETURNED_TO_THE_NEXT -DT_REVERSE
found blocks BUG_PUSHED_UNCHECKED
found blocks BUG_PUNCHED_AT_DEATH -DT_REVERSE
found blocks BUG_GIVES_BACK_A_CHILDS
found blocks BUG_DEFERRED_WITHOUT_LANE -DREVERSE
found ask BUG_ANSWERS_UNMARKED
found ask BUG_ASKED_BY_LANE
found ask BUG_ANSWER_UNCHECKED
found ask BUG_ANSWER_TO_ANY_LANE
found ask BUG_ANSWER_TO_ANY_QUESTION
found ask BUG_NUMBER_READ_LATE
found ask BUG_NUMBERED_LAST
found ask BUG_MEMORY_UNLOCKED
found ask BUG_ANSWER_SILENT
found ask BUG_ANSWERS_READ_LATE
found ask BUG_ASK_SILENT
found ask BUG_TAKEN_BACK_UNCHECKED
found ask BUG_ABANDON_CLAIMED_FIRST
found ask BUG_DEATH_IGNORES_ASKING
found ask BUG_DEATH_IGNORES_FORSAKEN
found ask BUG_ABANDON_ANSWERED
found ask BUG_FORSAKE_SILENT
found ask BUG_ANSWERED_UNCHECKED
found lookout BUG_LOOK_BEFORE_ARM
found lookout BUG_LOOK_NEVER
found lookout BUG_COUNTED_LAST
found lookout BUG_LEFT_TO_THE_LISTENER
found lookout BUG_LISTENER_DISARMS
found lookout BUG_LATE_BLOCKS -DREVERSE
found lookout BUG_PUT_BACK_SILENT
END
}

case "${1:-}" in
  --mistakes) mistakes ;;
  --cycles) cycles ;;
  *) holding ;;
esac | xargs -P "$(nproc)" -L 1 "$self" check | tee report
! grep -q FAILS report
