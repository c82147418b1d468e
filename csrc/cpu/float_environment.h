// While it lives: round to nearest, subnormals kept, whatever the caller (torch.set_flush_denormal,
// say) has set for this thread. Included for each instruction set, inside an anonymous namespace.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // exceptions masked, everything else off
  unsigned saved_;
#elif defined(__aarch64__)
  FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_) : : "memory");
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}) : "memory");
  }
  ~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }

 private:
  uint64_t saved_;
#endif

 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};
