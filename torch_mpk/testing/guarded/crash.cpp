// Tells another process why this one ends.
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <initializer_list>

namespace {

struct Crash {               // `Crash` of __init__.py
  int32_t signal, is_write;  // is_write: -1 if the processor does not say
  uint64_t address;
};

int pipe_end;

void tell(int signal, siginfo_t* info, [[maybe_unused]] void* context) {
  Crash crash{signal, -1, reinterpret_cast<uint64_t>(info->si_addr)};
#ifdef __x86_64__
  crash.is_write = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] >> 1 & 1;
#endif
  if (write(pipe_end, &crash, sizeof(crash)) < 0) _exit(1);
  _exit(128 + signal);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void tell_of_crashes(int fd) {
  pipe_end = fd;
  struct sigaction action = {};
  action.sa_sigaction = tell;
  action.sa_flags = SA_SIGINFO;
  for (int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL}) sigaction(signal, &action, nullptr);
}
