# Read by every bash before its script (BASH_ENV), for verl_script.py: programs are recorded, not started.
#
# A record is a file in $JAXRL_FOLDER/calls with texts that end in NUL: the working folder, what the script got
# for the output, the names of all variables, the words of the call. The folder bin is the whole PATH.

command_not_found_handle() { jaxrl_record "$@"; }
bash() { JAXRL_VARIABLES=$(jaxrl_variables) command bash "$@"; }
sh() { bash "$@"; }

command() { jaxrl_command "$@"; }
readonly -f command
trap() { jaxrl_trap "$@"; }

# -p would look for programs where the system has them, past the recorders.
jaxrl_command() {
    [[ ${1-} == -p ]] && shift
    builtin command "$@"
}

# A trap of the script's own on DEBUG would take the place of the recorder's.
jaxrl_trap() {
    if [[ " ${*:2} " == *" DEBUG "* ]]; then
        jaxrl_write '' "trap on DEBUG" "$@"
    else
        builtin trap "$@"
    fi
}

jaxrl_variables() {
    echo "${JAXRL_VARIABLES-}"
    compgen -v
}

jaxrl_write() { # OUTPUT WORD...
    printf '%s\0' "$PWD" "$1" "$(jaxrl_variables)" "${@:2}" > "$JAXRL_FOLDER/calls/$EPOCHREALTIME-$BASHPID"
}

jaxrl_record() { # WORD...
    local - output='' words=("$@") number word first status
    set +eux
    jaxrl_inline "$@"
    status=$?
    ((status == 99)) || return $status
    # A script that takes the output of a program must not get nothing in silence.
    if [[ -p /dev/fd/1 ]]; then
        output="OUTPUT_OF_$*"
        output=${output//[!a-zA-Z]/_}
        output=${output:0:60}
        echo "$output"
    fi
    jaxrl_write "$output" "$@"
    [[ ${#FUNCNAME[@]} -lt 50 && $SHLVL -lt 20 ]] || return 0
    [[ $1 == sbatch ]] && local -x SLURM_JOB_ID=${SLURM_JOB_ID:-1}
    # Launchers are given scripts and commands to run: srun bash train.sh, ssh HOST "python ...".
    for ((number = 0; number < ${#words[@]}; number++)); do
        word=${words[number]#--wrap=}
        case $word in
            bash | sh | */bash | */sh)
                bash "${words[@]:number+1}"
                return 0
                ;;
            *python*\ *verl* | *main_ppo*\ *)
                bash -c "$word"
                return 0
                ;;
        esac
        if [[ $word != *.py && -f $word && -r $word ]] && read -r first < "$word" && [[ $first == '#!'*sh* ]]; then
            bash "$word" "${words[@]:number+1}"
            return 0
        fi
    done
    # Their script is a heredoc; a command for the host leaves it to others, such as a loop over hosts.
    [[ $1 == sbatch || ($1 == ssh && $(jaxrl_without_options "${@:2}") == 1) ]] && bash
    return 0
}

jaxrl_without_options() { # WORD...: the number of words that are neither options of ssh nor their values
    local number=0
    while (($#)); do
        case $1 in
            -[BbcDEeFIiJLlmOoPpQRSWw]) shift ;;
            -*) ;;
            *) ((++number)) ;;
        esac
        shift
    done
    echo $number
}

# Runs Python that stands in the script itself (python -c CODE, python - <<EOF), in the sandbox, and returns its
# status; 99 if there is none, or if it would print something and fails here.
jaxrl_inline() { # WORD...
    local words=("$@") number=0 code printed status
    while [[ ${words[number]-} && ${words[number]##*/} != python* ]]; do ((++number)); done
    while [[ ${words[number+1]-} == -[uBsEIO] ]]; do ((++number)); done
    case ${words[number + 1]-} in
        -c) code=${words[number + 2]-} ;;
        -) code=$(cat) ;;
        *) return 99 ;;
    esac
    printed='' status=1
    if [[ $JAXRL_SANDBOX ]]; then
        printed=$("$JAXRL_PYTHON" -c "$code" "${words[@]:number+3}" 2> /dev/null)
        status=$?
    fi
    [[ $printed ]] && printf '%s\n' "$printed"
    ((status == 0)) && return 0
    [[ $code == *print* ]] && return 99
    # It looks whether a package is there. What verl needs is; other accelerators than GPUs are not.
    jaxrl_write '' "$@"
    [[ $code != *@(npu|musa|xpu|hpu|mlu|xla|tpu)* ]]
}

# What `source` reads is noted. In the sandbox a missing file is made, so that the script goes on.
jaxrl_source() { # WORDS
    local names=()
    eval "names=(${1%%[<>]*})"
    [[ ${names-} ]] || return 0
    if [[ ! -e $names && $JAXRL_SANDBOX ]]; then
        jaxrl_make "$names"
        jaxrl_write '' "source of nothing" "$names"
    else
        jaxrl_write '' source "$names"
    fi
} > /dev/null 2>&1

jaxrl_make() { # FILE
    [[ $1 == */* ]] && mkdir -p -- "${1%/*}"
    : > "$1"
}

jaxrl_before() {
    PATH=$JAXRL_FOLDER/bin
    [[ ${FUNCNAME[1]-} == jaxrl_* ]] && return 0
    if [[ $BASH_COMMAND == builtin\ *command\ *-p* ]]; then
        echo "builtin command -p starts programs past the recorders; write command -p" >&2
        exit 3
    fi
    [[ $BASH_COMMAND == *[/\$]* || $BASH_COMMAND == *-[fderxs]\ * || $BASH_COMMAND == @(source|.)\ * ]] || return 0
    local -
    # First, or set -x shows what follows.
    { set +eux -f; } 2> /dev/null
    local IFS=$' \t\n' rest=$BASH_COMMAND words word names looks='' before=''
    case $BASH_COMMAND in
        exec\ *) export JAXRL_VARIABLES=$(compgen -v) ;;
        source\ * | .\ *) jaxrl_source "${BASH_COMMAND#* }" ;;
        test\ * | \[*) looks=1 ;;
    esac
    read -r -d '' -a words <<< "${BASH_COMMAND:0:1000}"
    words=("${words[@]:0:40}")
    while [[ $rest == *'> '* ]]; do
        rest=${rest#*> }
        words+=('>' "${rest%% *}")
    done
    for word in "${words[@]}"; do
        word=${word//\"/}
        names=("$word")
        # Only words that `eval` can read: a syntax error in it would end a subshell.
        if [[ $word != *[!A-Za-z0-9_./~:@\$\{\}\[\]-]* ]] &&
            [[ $word == *\{*\}* || $word != *[\{\}]* ]]; then
            eval "names=($word)" 2> /dev/null
        elif [[ $word != '>' ]]; then
            continue
        fi
        word=${names-}
        if [[ $looks && $before == -[fderxs] && ! -e $word ]]; then
            jaxrl_write '' "${JAXRL_CHECKS:-check of nothing}" "$word"
            if [[ ! $JAXRL_CHECKS ]]; then :; elif [[ $before == -d ]]; then mkdir -p -- "$word"; else jaxrl_make "$word"; fi 2> /dev/null
        fi
        [[ $before == '>' && $word == */* && $JAXRL_SANDBOX ]] && mkdir -p -- "${word%/*}" 2> /dev/null
        before=$word
        # A program that is named by its path gets a function of that name, which records it.
        [[ $word != */* || $word == *[!A-Za-z0-9_./:@-]* ]] && continue
        if [[ -f $word && $word == *.sh ]]; then
            eval "function $word { bash $word \"\$@\"; }"
        else
            eval "function $word { ${word##*/} \"\$@\"; }" 2> /dev/null
        fi
    done
    return 0
}

if [[ $JAXRL_SANDBOX ]]; then
    # Files cost nothing here, and those of other machines are missing.
    cd() { builtin cd "$@" 2> /dev/null || { command mkdir -p -- "${@: -1}" && builtin cd "$@"; }; }
    for jaxrl_name in chmod cp ln mkdir mv rm rmdir touch; do
        eval "$jaxrl_name() { command $jaxrl_name \"\$@\" || :; }"
    done
fi
for jaxrl_name in $JAXRL_RECORDED; do
    eval "$jaxrl_name() { jaxrl_record $jaxrl_name \"\$@\"; }"
done
((BASH_VERSINFO[0] >= 5)) || {
    echo "bash $BASH_VERSION is too old, 5.0 is needed" >&2
    exit 3
}
ulimit -f 16384 # 16 MB a file
# A limit of the user's machine that cannot be raised here does not end the script.
ulimit() { builtin ulimit "$@" 2> /dev/null || :; }
set -T
builtin trap jaxrl_before DEBUG
