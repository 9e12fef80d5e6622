// Runs one of the built programs as a user does: arguments, environment, standard streams, signals,
// exit code, and the most memory it ever held. Without the COLIBRI_ variables of whoever tests.
// Threads: one object, one thread. Nothing waits for time to pass: a test goes on when the program
// has said something or has ended.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace colibri {

struct ProgramOutcome {
  int exit_code = -1;  // -1 when a signal ended it
  int signal = 0;
  std::string out, err;
  uint64_t peak_bytes = 0;  // peak resident memory
};

class RunningProgram {
 public:
  enum class Screen : uint8_t { kPipes, kTerminal };  // kTerminal: what is on it is `out`

  // name: of a program in the build folder, or the whole path of another one. environment:
  // "NAME=value", added to ours. ignored: a signal that the program finds ignored.
  RunningProgram(const std::string& name, const std::vector<std::string>& arguments,
                 const std::vector<std::string>& environment = {}, Screen screen = Screen::kPipes,
                 int ignored = 0) {
    // A program that ends early must not take the test along.
    ::signal(SIGPIPE, SIG_IGN);
    std::array<int, 2> in = Pipe(), out{}, err{};
    if (screen == Screen::kPipes) {
      out = Pipe();
      err = Pipe();
    } else {
      out = Terminal();
      err = {-1, fcntl(out[1], F_DUPFD_CLOEXEC, 0)};
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, err[1], STDERR_FILENO);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t usual;
    sigemptyset(&usual);
    sigaddset(&usual, SIGPIPE);
    // Whatever whoever runs the tests ignores, as a shell does for what it puts behind.
    for (const int signal : {SIGINT, SIGTERM, SIGQUIT}) {
      if (signal != ignored) sigaddset(&usual, signal);
    }
    void (*const before)(int) = ignored == 0 ? nullptr : ::signal(ignored, SIG_IGN);
    posix_spawnattr_setsigdefault(&attributes, &usual);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    const std::string path = name.front() == '/' ? name : COLIBRI_BINARY_DIR "/" + name;
    std::vector<char*> argv = {const_cast<char*>(path.c_str())};
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    std::vector<char*> envp;
    for (char** e = environ; *e != nullptr; ++e) {
      if (!std::string_view(*e).starts_with("COLIBRI_")) envp.push_back(*e);
    }
    // Nothing is measured but where a test asks for it.
    std::string unpredicted = "COLIBRI_NO_PREDICTION=1";
    bool said = false;
    for (const std::string& e : environment) {
      said |= e.starts_with("COLIBRI_NO_PREDICTION=");
      envp.push_back(const_cast<char*>(e.c_str()));
    }
    if (!said) envp.push_back(unpredicted.data());
    envp.push_back(nullptr);
    const int error =
        posix_spawn(&pid_, path.c_str(), &actions, &attributes, argv.data(), envp.data());
    if (ignored != 0) ::signal(ignored, before);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    for (const int fd : {in[0], out[1], err[1]}) close(fd);
    in_ = in[1];
    out_ = out[0];
    err_ = err[0];
    if (error != 0) throw std::runtime_error(path + " cannot be started: is it built?");
  }

  // A test that fails half-way leaves nothing running.
  ~RunningProgram() {
    for (const int fd : {in_, out_, err_}) {
      if (fd >= 0) close(fd);
    }
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  RunningProgram(const RunningProgram&) = delete;
  RunningProgram& operator=(const RunningProgram&) = delete;

  // False: the program no longer reads. Also from one other thread.
  bool Write(std::string_view text) const {
    while (!text.empty()) {
      const ssize_t wrote = write(in_, text.data(), text.size());
      if (wrote <= 0) return false;
      text.remove_prefix(static_cast<size_t>(wrote));
    }
    return true;
  }
  void CloseInput() { CloseOne(&in_); }
  void CloseOutput() { CloseOne(&out_); }
  void CloseErrors() { CloseOne(&err_); }
  void Signal(int signal) const { kill(pid_, signal); }
  pid_t Pid() const { return pid_; }

  // Reads both streams until `text` has been seen, behind the first `from` bytes; false when the
  // stream ended without it.
  bool WaitForOutput(std::string_view text) { return ReadUntil(out_, outcome_.out, text, 0); }
  bool WaitForErrors(std::string_view text, size_t from = 0) {
    return ReadUntil(err_, outcome_.err, text, from);
  }
  const std::string& OutputSoFar() const { return outcome_.out; }
  const std::string& ErrorsSoFar() const { return outcome_.err; }

  // Closes the input, reads the rest, waits for the end.
  ProgramOutcome Wait() {
    CloseInput();
    while (out_ >= 0 || err_ >= 0) ReadSome();
    int status = 0;
    rusage usage{};
    wait4(pid_, &status, 0, &usage);
    pid_ = -1;
    if (WIFEXITED(status)) outcome_.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) outcome_.signal = WTERMSIG(status);
    outcome_.peak_bytes = static_cast<uint64_t>(usage.ru_maxrss) * 1024;
    return outcome_;
  }

 private:
  // [0] is read, [1] written.
  static std::array<int, 2> Pipe() {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    return ends;
  }
  static std::array<int, 2> Terminal() {
    const int ours = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (ours < 0 || grantpt(ours) != 0 || unlockpt(ours) != 0) {
      throw std::runtime_error("no pseudo terminal");
    }
    return {ours, open(ptsname(ours), O_RDWR | O_NOCTTY | O_CLOEXEC)};
  }
  static void CloseOne(int* fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }
  bool ReadUntil(const int& fd, const std::string& seen, std::string_view text, size_t from) {
    while (seen.size() < from || seen.find(text, from) == std::string::npos) {
      if (fd < 0) return false;
      ReadSome();
    }
    return true;
  }
  static void ReadOne(const pollfd& ready, int* fd, std::string* into) {
    if (*fd < 0 || ready.revents == 0) return;
    std::array<char, 65536> buffer;
    const ssize_t got = read(*fd, buffer.data(), buffer.size());
    if (got > 0) {
      into->append(buffer.data(), static_cast<size_t>(got));
    } else {
      CloseOne(fd);
    }
  }
  void ReadSome() {
    std::array<pollfd, 2> ready = {pollfd{out_, POLLIN, 0}, pollfd{err_, POLLIN, 0}};
    poll(ready.data(), ready.size(), -1);
    ReadOne(ready[0], &out_, &outcome_.out);
    ReadOne(ready[1], &err_, &outcome_.err);
  }

  pid_t pid_ = -1;
  int in_ = -1, out_ = -1, err_ = -1;
  ProgramOutcome outcome_;
};

inline ProgramOutcome RunProgram(const std::string& name, const std::vector<std::string>& arguments,
                                 std::string_view input = "",
                                 const std::vector<std::string>& environment = {}) {
  RunningProgram program(name, arguments, environment);
  program.Write(input);
  return program.Wait();
}

// Under ASan memory is several times what the program asked for.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif
#else
inline constexpr bool kAddressSanitizer = false;
#endif

}  // namespace colibri
