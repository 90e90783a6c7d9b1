#!/bin/sh
# Stands in for nvidia-cuda-mps-control: a daemon that does nothing, and the orders that it answers.
pid_file=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then
    if [ -n "$FAKE_MPS_REFUSES" ]; then
        echo "the driver is too old"
        exit 1
    fi
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    env >"$CUDA_MPS_LOG_DIRECTORY/environment"
    setsid sleep 600 </dev/null >/dev/null 2>&1 &
    echo $! >"$pid_file"
    exit 0
fi
read -r order
pid=$(cat "$pid_file" 2>/dev/null) && kill -0 "$pid" 2>/dev/null || exit 1
case $order in
    get_default_active_thread_percentage) echo 100.0 ;;
    quit*) [ -n "$FAKE_MPS_HANGS" ] || { rm "$pid_file"; kill "$pid"; } ;;
esac
