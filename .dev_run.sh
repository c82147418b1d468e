set -u
export OMP_WAIT_POLICY=passive TORCHINDUCTOR_VEC_ISA_OK=1 PYTHONUNBUFFERED=1
echo "CXX=$CXX"
(TORCH_CUDA_ARCH_LIST=9.0 MAX_JOBS=8 python3 -m pip install -q --no-build-isolation --no-deps . > $OUT/build.log 2>&1; echo "build rc $?") &
(cmake -S . -B /tmp/cd -G Ninja -DWITH_TORCH=OFF -DWITH_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90 > $OUT/cd.log 2>&1 && cmake --build /tmp/cd --target cuda_driver >> $OUT/cd.log 2>&1; echo "driver rc $?") &
wait
date +%T
D=/tmp/cd/tests/cpp/cuda_driver
$D; 
for t in memcheck racecheck initcheck synccheck; do (timeout 200 compute-sanitizer --tool $t --error-exitcode 9 $D 300000 > $OUT/san.$t.log 2>&1; echo "$t rc $?") & done
wait
for t in memcheck racecheck initcheck synccheck; do tail -3 $OUT/san.$t.log; done
date +%T
cd /tmp && timeout 100 numerics-gate check > $OUT/gate.log 2>&1; echo "gate rc $?"; tail -22 $OUT/gate.log; cd - >/dev/null
date +%T
cd $OUT && tar czf logs.tgz *.log && rm -f *.log
