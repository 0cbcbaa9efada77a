// The gannet command as a user meets it: what it prints, its exit codes, memory, Ctrl-C, and one line for every bad
// input.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "gannet/version.h"
#include "model_runs.h"

namespace gannet::e2e {
namespace {

namespace fs = std::filesystem;

struct Ran {
  int code = -1;  // -1: ended by a signal
  std::string out, err;
  int64_t peak_bytes = 0;
};

std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

void spit(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
}

/// A folder of its own for each test program run, removed at the end.
class Scratch {
 public:
  Scratch() : path_(fs::temp_directory_path() / ("gannet_command." + std::to_string(getpid()))) {
    fs::create_directories(path_);
  }
  ~Scratch() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};
const fs::path& scratch() {
  static const Scratch s;
  return s.path();
}

/// Starts the command with its streams in files; `input` is its standard input.
pid_t start(const std::vector<std::string>& args, const std::string& input, const fs::path& out = scratch() / "out") {
  spit(scratch() / "in", input);
  for (const char* stream : {"out", "err"}) fs::remove(scratch() / stream);  // what is there later is this run's
  const pid_t pid = fork();
  if (pid != 0) return pid;
  const auto redirect = [](const fs::path& path, int flags, int fd) {
    const int file = open(path.c_str(), flags, 0600);
    if (file < 0 || dup2(file, fd) < 0) _exit(99);
  };
  redirect(scratch() / "in", O_RDONLY, 0);
  redirect(out, O_WRONLY | O_CREAT | O_TRUNC, 1);
  redirect(scratch() / "err", O_WRONLY | O_CREAT | O_TRUNC, 2);
  std::vector<char*> argv;
  std::string program = GANNET_COMMAND;
  argv.push_back(program.data());
  std::vector<std::string> copies = args;
  for (std::string& a : copies) argv.push_back(a.data());
  argv.push_back(nullptr);
  for (const char* name : {"GANNET_MODEL", "GANNET_THREADS", "GANNET_IMPL"}) unsetenv(name);
  execv(GANNET_COMMAND, argv.data());
  _exit(98);
}

Ran finish(pid_t pid) {
  int status = 0;
  rusage usage{};
  EXPECT_EQ(wait4(pid, &status, 0, &usage), pid);
  Ran r;
  r.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  r.out = slurp(scratch() / "out");
  r.err = slurp(scratch() / "err");
  r.peak_bytes = int64_t{usage.ru_maxrss} * 1024;
  return r;
}

Ran gannet_command(const std::vector<std::string>& args, const std::string& input = "") {
  return finish(start(args, input));
}

const std::string kModel = checkpoint_dir("tiny-dsv32");
constexpr const char* kKing = "Once upon a time there was a king who had";

std::vector<std::string> generate(std::vector<std::string> more) {
  std::vector<std::string> args = {"generate", "--model", kModel};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

TEST(Generate, StreamsTheGoldenTextAndPrintsTheTable) {
  const Ran r = gannet_command(generate({"--prompt", kKing, "--max-new-tokens", "48", "--ignore-eos", "--kv-dtype",
                                         "fp32", "--index-dtype", "fp32", "--threads", "2"}));
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_TRUE(r.err.empty()) << r.err;  // no progress bar where stderr is no terminal
  const nlohmann::json golden = nlohmann::json::parse(slurp(kModel + "/golden.json"));
  EXPECT_EQ(r.out.rfind(golden["short"]["greedy_text"].get<std::string>(), 0), 0u) << r.out;
  for (const char* line : {"\nprompt ", "\ngenerated ", "\nprefill ", "\ndecode ", "\nKV cache ", "\nsparse layers ",
                           "\nattention ", "\nprojections ", "\nthreads ", "\nmemory "})
    EXPECT_NE(r.out.find(line), std::string::npos) << line << " in " << r.out;
}

TEST(Generate, TakesItsPromptFromEverywhere) {
  spit(scratch() / "prompt", kKing);
  const GoldenPrompt golden = golden_prompt("tiny-dsv32", "short");
  std::string ids;
  for (const int32_t id : golden.ids) ids.append(ids.empty() ? "" : ",").append(std::to_string(id));
  const std::vector<std::string> common = {"--max-new-tokens", "8", "--text-only"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), common.begin(), common.end());
    return generate(more);
  };
  const Ran text = gannet_command(with({"--prompt", kKing}));
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_FALSE(text.out.empty());
  EXPECT_EQ(gannet_command(with({"--prompt-file", (scratch() / "prompt").string()})).out, text.out);
  EXPECT_EQ(gannet_command(with({}), kKing).out, text.out);
  EXPECT_EQ(gannet_command(with({"--ids", ids})).out, text.out);
  EXPECT_EQ(gannet_command(with({"--prompt", kKing, "--tokenizer", kModel + "/tokenizer.json"})).out, text.out);
}

TEST(Generate, JsonHoldsEverything) {
  const Ran r = gannet_command(generate({"--prompt", kKing, "--max-new-tokens", "8", "--json"}));
  ASSERT_EQ(r.code, 0) << r.err;
  const nlohmann::json out = nlohmann::json::parse(r.out);
  EXPECT_EQ(out["prompt_tokens"], 12);
  EXPECT_EQ(out["generated_tokens"], 8);
  EXPECT_EQ(out["ids"].size(), 8u);
  EXPECT_EQ(out["finish"], "max new tokens");
  EXPECT_EQ(out["kv_bytes_per_token"], 4 * (576 * 2 + 132));
  // Rows 1 to 12 of the prompt and 13 to 19 of the decode see all their tokens, in each of 4 layers.
  EXPECT_EQ(out["sparse_visible_tokens"], 4 * 19 * 20 / 2);
  EXPECT_EQ(out["sparse_attended_tokens"], out["sparse_visible_tokens"]);
  EXPECT_EQ(out["backend"], "dsa");
  EXPECT_TRUE(out["implementations"].contains("sparse_attention"));
}

TEST(Generate, SaysWhichFormItsPromptTook) {
  // 40 tokens in chunks of 16: three steps of prefill.
  std::string ids = "1";
  for (int i = 2; i <= 40; ++i) ids.append(",").append(std::to_string(i));
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> args = {"generate",
                                     "--model",
                                     checkpoint_dir("v3-yarn"),
                                     "--ids",
                                     ids,
                                     "--chunk",
                                     "16",
                                     "--max-new-tokens",
                                     "2",
                                     "--device",
                                     "cpu",
                                     "--kv-dtype",
                                     "fp32"};
    args.insert(args.end(), more.begin(), more.end());
    return args;
  };
  std::vector<int32_t> tokens;
  for (const char* form : {"auto", "expanded", "absorbed"}) {
    const Ran r = gannet_command(with({"--prefill-form", form, "--json"}));
    ASSERT_EQ(r.code, 0) << r.err;
    const nlohmann::json out = nlohmann::json::parse(r.out);
    EXPECT_EQ(out["prefill_form"], form);
    const int expanded = out["prefill_steps_expanded"], absorbed = out["prefill_steps_absorbed"];
    EXPECT_EQ(expanded + absorbed, 3) << form;
    EXPECT_TRUE(form != std::string("expanded") || absorbed == 0) << absorbed;
    EXPECT_TRUE(form != std::string("absorbed") || expanded == 0) << expanded;
    const std::vector<int32_t> made = out["ids"];
    if (tokens.empty()) tokens = made;
    EXPECT_EQ(made, tokens) << form;
  }
  const Ran table = gannet_command(with({"--prefill-form", "expanded"}));
  EXPECT_NE(table.out.find("prefill form  expanded: expanded in 3 steps, absorbed in 0"), std::string::npos)
      << table.out;
  const Ran invariant = gannet_command(with({"--invariant"}));
  EXPECT_NE(invariant.out.find("prefill form  auto: expanded in 0 steps, absorbed in 3"), std::string::npos)
      << invariant.out;
}

TEST(Generate, SpeculatesWithTheMtpLayer) {
  const auto generated = [&](const std::string& drafts) {
    const Ran r = gannet_command(generate(
        {"--prompt", kKing, "--max-new-tokens", "40", "--ignore-eos", "--invariant", "--speculate", drafts, "--json"}));
    EXPECT_EQ(r.code, 0) << r.err;
    return nlohmann::json::parse(r.out);
  };
  const nlohmann::json plain = generated("0"), drafts = generated("3");
  EXPECT_EQ(plain["ids"], drafts["ids"]);
  EXPECT_FALSE(plain.contains("acceptance_rate"));
  EXPECT_GT(drafts["acceptance_rate"], 0.1);
  EXPECT_EQ(drafts["accepted_tokens"].get<int>() + drafts["decode_steps"].get<int>(), 39);
  EXPECT_EQ(drafts["kv_bytes_per_token"], 5 * (576 * 2 + 132));  // the MTP layer has caches too
  const Ran table = gannet_command(generate({"--prompt", kKing, "--max-new-tokens", "9", "--speculate", "2"}));
  EXPECT_NE(table.out.find("\nspeculation "), std::string::npos) << table.out;
}

TEST(Generate, TakesEveryFormatThatTheFamilyAllows) {
  const auto bytes = [&](const std::string& model, const std::vector<std::string>& formats) {
    std::vector<std::string> args = {"generate", "--model",      checkpoint_dir(model), "--ids",
                                     "0,5,6,7",  "--ignore-eos", "--max-new-tokens",    "3",
                                     "--json"};
    args.insert(args.end(), formats.begin(), formats.end());
    const Ran r = gannet_command(args);
    EXPECT_EQ(r.code, 0) << model << " " << formats[1] << ": " << r.err;
    return r.code == 0 ? nlohmann::json::parse(r.out)["kv_bytes_per_token"].get<int64_t>() : 0;
  };
  const std::vector<std::pair<std::string, int64_t>> latents = {
      {"fp32", 2304}, {"bf16", 1152}, {"e4m3", 576}, {"packed656", 656}, {"e4m3_per_token", 644}};
  for (const auto& [name, size] : latents) {
    EXPECT_EQ(bytes("v3-yarn", {"--kv-dtype", name}), 3 * size) << name;
    if (name == "e4m3_per_token") continue;
    EXPECT_EQ(bytes("tiny-dsv32", {"--kv-dtype", name}), 4 * (size + 132)) << name;
  }
  for (const auto& [name, size] :
       std::vector<std::pair<std::string, int64_t>>{{"fp32", 512}, {"bf16", 256}, {"fp8", 132}, {"fp8_pow2", 132}})
    EXPECT_EQ(bytes("tiny-dsv32", {"--index-dtype", name}), 4 * (1152 + size)) << name;
  EXPECT_EQ(bytes("v3-yarn", {"--kv-dtype", "e4m3", "--kv-scale", "0.25"}), 3 * 576);
  EXPECT_EQ(bytes("tiny-dsv32", {"--index-dtype", "fp8", "--index-hadamard"}), 4 * (1152 + 132));
  // What info lists is what generate takes.
  const Ran info = gannet_command({"info", "--model", kModel, "--json"});
  const nlohmann::json cost = nlohmann::json::parse(info.out)["model"]["kv_bytes_per_token"];
  ASSERT_EQ(cost.size(), 12u) << cost.dump();
  EXPECT_EQ(cost["latent packed656, index keys fp8 or fp8_pow2"], 4 * (656 + 132));
  const Ran dense = gannet_command({"info", "--model", checkpoint_dir("v3-yarn"), "--json"});
  EXPECT_EQ(nlohmann::json::parse(dense.out)["model"]["kv_bytes_per_token"].size(), 5u);
}

TEST(Generate, SamplingRepeatsWithItsSeed) {
  const auto sampled = [&](const std::string& seed) {
    return gannet_command(generate({"--prompt", kKing, "--max-new-tokens", "24", "--temperature", "1.2", "--top-p",
                                    "0.95", "--seed", seed, "--text-only"}))
        .out;
  };
  EXPECT_EQ(sampled("1"), sampled("1"));
  EXPECT_NE(sampled("1"), sampled("2"));
  EXPECT_EQ(gannet_command(generate({"--prompt", kKing, "--max-new-tokens", "8", "--temperature", "0.7", "--top-p",
                                     "1e-6", "--text-only"}))
                .out,
            gannet_command(generate({"--prompt", kKing, "--max-new-tokens", "8", "--text-only"})).out);
}

TEST(Generate, EveryImplementationIsForcibleByName) {
  for (const std::string& impl : implementations(true)) {
    const Ran r = gannet_command(generate({"--prompt", kKing, "--max-new-tokens", "4", "--impl", impl, "--json"}));
    ASSERT_EQ(r.code, 0) << r.err;
    for (const auto& [op, ran] : nlohmann::json::parse(r.out)["implementations"].items()) EXPECT_EQ(ran, impl) << op;
  }
}

TEST(Generate, InvariantRunsAreEqualForEveryChunkAndThreadCount) {
  const auto ids = [&](const std::string& chunk, const std::string& threads) {
    const Ran r = gannet_command(generate({"--prompt", kKing, "--max-new-tokens", "16", "--invariant", "--chunk", chunk,
                                           "--threads", threads, "--text-only"}));
    EXPECT_EQ(r.code, 0) << r.err;
    return r.out;
  };
  EXPECT_EQ(ids("1", "1"), ids("1000", "3"));
}

TEST(Generate, EveryCheckpointRuns) {
  for (const std::string& name : checkpoint_names()) {
    const Ran r = gannet_command({"generate", "--model", checkpoint_dir(name), "--ids", "0,5,6,7", "--ignore-eos",
                                  "--max-new-tokens", "5", "--json"});
    ASSERT_EQ(r.code, 0) << name << ": " << r.err;
    EXPECT_EQ(nlohmann::json::parse(r.out)["ids"].size(), 5u) << name;
  }
}

// Acceptance: peak memory at most the mapped weights, the pool asked for, and 200 MB, with a prompt of 4,000 tokens: a
// matrix of [4000 x 4000] floats alone would be 64 MB for each head or index head.
TEST(Generate, MemoryIsBoundedAtFourThousandTokens) {
  std::string ids = "0";
  for (int i = 1; i < 4000; ++i) ids.append(",").append(std::to_string(2 + (i * 7919) % 2000));
  for (const char* kv : {"bf16", "fp32"}) {
    const Ran r =
        gannet_command(generate({"--ids", ids, "--max-new-tokens", "4", "--ignore-eos", "--kv-dtype", kv, "--json"}));
    ASSERT_EQ(r.code, 0) << r.err;
    const nlohmann::json out = nlohmann::json::parse(r.out);
    EXPECT_EQ(out["prompt_tokens"], 4000);
    const int64_t allowed = out["mapped_weight_bytes"].get<int64_t>() + out["pool_bytes"].get<int64_t>() + 200'000'000;
    std::printf("[ %s ] peak %.1f MB of %.1f MB allowed\n", kv, static_cast<double>(r.peak_bytes) / 1e6,
                static_cast<double>(allowed) / 1e6);
    EXPECT_LE(r.peak_bytes, allowed);
  }
}

TEST(Generate, CtrlCEndsCleanlyWithTheTable) {
  const pid_t pid = start(generate({"--prompt", kKing, "--max-new-tokens", "8000", "--ignore-eos"}), "");
  // Until the first text is out, the handler is in place and the run far from its end.
  for (int i = 0; i < 2000 && slurp(scratch() / "out").empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  ASSERT_EQ(kill(pid, SIGINT), 0);
  const Ran r = finish(pid);
  EXPECT_EQ(r.code, 130);
  EXPECT_NE(r.out.find("(interrupted)"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("\nmemory "), std::string::npos);
}

TEST(Command, PrintsItsVersionAndHelp) {
  const Ran v = gannet_command({"--version"});
  EXPECT_EQ(v.code, 0);
  EXPECT_EQ(v.out, std::string("gannet ") + version() + "\n");
  for (const std::vector<std::string>& args : {std::vector<std::string>{"--help"},
                                               {"generate", "--help"},
                                               {"info", "--help"},
                                               {"verify", "--help"},
                                               {"bench", "--help"}}) {
    const Ran h = gannet_command(args);
    EXPECT_EQ(h.code, 0);
    EXPECT_NE(h.out.find("--help"), std::string::npos);
  }
}

TEST(Command, FailsWhereItsOutputCannotBeWritten) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  const std::vector<std::vector<std::string>> commands = {
      {"--version"}, {"info"}, generate({"--ids", "0,5", "--max-new-tokens", "1"})};
  for (const std::vector<std::string>& args : commands) {
    const Ran r = finish(start(args, "", "/dev/full"));
    EXPECT_EQ(r.code, 1) << args[0];
    EXPECT_NE(r.err.find("standard output"), std::string::npos) << args[0] << ": " << r.err;
  }
}

TEST(Info, ShowsMachineImplementationsAndCheckpoint) {
  const Ran r = gannet_command({"info", "--model", kModel, "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  const nlohmann::json out = nlohmann::json::parse(r.out);
  EXPECT_EQ(out["model"]["family"], "deepseek_v32");
  EXPECT_EQ(out["model"]["index_topk"], 256);
  EXPECT_EQ(out["model"]["parameters"], 11479264);
  for (const auto& [op, list] : out["machine"]["implementations"].items()) {
    EXPECT_EQ(list.back()["name"], "ref") << op;
    EXPECT_GE(list.size(), 2u) << op;
  }
  EXPECT_EQ(gannet_command({"info"}).code, 0);
}

TEST(Verify, HoldsOperationsToTheOracle) {
  const Ran r = gannet_command({"verify", "--op", "merge_state"});
  EXPECT_EQ(r.code, 0) << r.out << r.err;
  for (const std::string& impl : implementations(false)) EXPECT_NE(r.out.find(impl), std::string::npos) << impl;
  EXPECT_NE(r.out.find("all checks passed"), std::string::npos);
}

TEST(Verify, PassesOnARightCheckpointAndFailsOnAWrongOne) {
  const Ran right = gannet_command({"verify", "--model", checkpoint_dir("v3-yarn")});
  EXPECT_EQ(right.code, 0) << right.out << right.err;
  EXPECT_NE(right.out.find("all checks passed"), std::string::npos);

  // The same weights under another frequency of RoPE: every figure moves.
  const fs::path wrong = scratch() / "wrong";
  fs::remove_all(wrong);
  fs::create_directories(wrong);
  for (const auto& entry : fs::directory_iterator(checkpoint_dir("v3-yarn")))
    fs::create_symlink(entry.path(), wrong / entry.path().filename());
  nlohmann::json config = nlohmann::json::parse(slurp(wrong / "config.json"));
  config["rope_theta"] = 20000.0;
  fs::remove(wrong / "config.json");
  spit(wrong / "config.json", config.dump());
  const Ran r = gannet_command({"verify", "--model", wrong.string()});
  EXPECT_EQ(r.code, 1) << r.out;
  EXPECT_NE(r.out.find("FAILED"), std::string::npos);
}

// ---- bad input ----------------------------------------------------------------------------------------------------

/// Exit code 2, nothing on stdout, and one line on stderr that holds all of `words`.
void expect_refused(const std::vector<std::string>& args, const std::vector<std::string>& words,
                    const std::string& input = "") {
  const Ran r = gannet_command(args, input);
  std::string shown;
  for (const std::string& a : args) shown += a.substr(0, 60) + " ";
  EXPECT_EQ(r.code, 2) << shown << "\n" << r.err;
  EXPECT_TRUE(r.out.empty()) << shown << "\n" << r.out;
  EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << shown << "\n" << r.err;
  for (const std::string& word : words)
    EXPECT_NE(r.err.find(word), std::string::npos) << "no \"" << word << "\" in: " << r.err;
}

/// A checkpoint like tiny-dsv32 whose files are links, but for what `change` does to the folder.
fs::path broken_model(const std::string& name, const std::function<void(const fs::path&)>& change) {
  const fs::path dir = scratch() / name;
  fs::remove_all(dir);
  fs::create_directories(dir);
  for (const auto& entry : fs::directory_iterator(kModel))
    fs::create_symlink(entry.path(), dir / entry.path().filename());
  change(dir);
  return dir;
}

fs::path with_config(const std::string& name, const std::function<void(nlohmann::json&)>& change) {
  return broken_model(name, [&](const fs::path& dir) {
    nlohmann::json config = nlohmann::json::parse(slurp(dir / "config.json"));
    change(config);
    fs::remove(dir / "config.json");
    spit(dir / "config.json", config.dump());
  });
}

std::vector<std::string> on_model(const fs::path& dir, std::vector<std::string> more = {}) {
  std::vector<std::string> args = {"generate", "--model", dir.string(), "--ids", "0,5,6", "--max-new-tokens", "1"};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

TEST(Generate, WarnsOfTensorsThatTheModelDoesNotKnow) {
  const std::string shard = "model-00001-of-00002.safetensors";
  const std::string bytes = slurp(fs::path(kModel) / shard);
  // MTP tensors (layer 4) are known and silent; a layer norm under another name is not.
  const fs::path dir = broken_model("unknown_tensor", [&](const fs::path& d) {
    nlohmann::json index = nlohmann::json::parse(slurp(d / "model.safetensors.index.json"));
    index["weight_map"]["model.extra\x1b[31m.weight"] = "extra.safetensors";
    fs::remove(d / "model.safetensors.index.json");
    spit(d / "model.safetensors.index.json", index.dump());
    std::string header = R"({"model.extra\u001b[31m.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t n = header.size();
    std::string file(sizeof n, '\0');
    std::memcpy(file.data(), &n, sizeof n);
    spit(d / "extra.safetensors", file + header + std::string(8, '\0'));
  });
  const Ran r = gannet_command(on_model(dir));
  EXPECT_EQ(r.code, 0) << r.err;
  // The name comes from a file: its control characters do not reach the terminal.
  EXPECT_NE(r.err.find("warning: tensor \"model.extra\\u001b[31m.weight\""), std::string::npos) << r.err;
  EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
}

// A checkpoint that announces an MTP layer which its files lack runs; only drafting is refused, by one line.
TEST(Generate, RunsWithoutTheMtpLayerThatIsAnnounced) {
  const fs::path dir = with_config("announced", [](nlohmann::json& c) {
    c["num_hidden_layers"] = 3;  // layer 3 is then the one announced first, and has no enorm
  });
  const Ran r = gannet_command(on_model(dir));
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_TRUE(r.err.empty()) << r.err;
  expect_refused(on_model(dir, {"--speculate", "1"}), {"model.layers.3.enorm.weight", "missing"});
}

TEST(BadInput, OptionsOfTheCommand) {
  expect_refused({}, {"subcommand"});
  expect_refused({"fly"}, {"fly"});
  expect_refused({"generate"}, {"--model"});
  expect_refused(generate({"--prompt", kKing, "--frobnicate"}), {"--frobnicate"});
  expect_refused(generate({"--prompt", kKing, "--threads", "many"}), {"--threads", "many"});
  expect_refused(generate({"--prompt", kKing, "--threads", "-1"}), {"--threads", "-1"});
  expect_refused(generate({"--prompt", kKing, "--max-new-tokens", "-1"}), {"--max-new-tokens", "-1"});
  expect_refused(generate({"--prompt", kKing, "--max-new-tokens", "99999999999999999999"}), {"--max-new-tokens"});
  expect_refused(generate({"--prompt", kKing, "--temperature", "-0.5"}), {"temperature", "-0.5"});
  expect_refused(generate({"--prompt", kKing, "--temperature", "nan"}), {"temperature", "nan"});
  expect_refused(generate({"--prompt", kKing, "--top-p", "1.5"}), {"top_p", "1.5"});
  expect_refused(generate({"--prompt", kKing, "--chunk", "-5"}), {"--chunk", "-5"});
  expect_refused(generate({"--prompt", kKing, "--pages", "-5"}), {"--pages", "-5"});
  expect_refused(generate({"--prompt", kKing, "--kv-dtype", "fp16"}), {"--kv-dtype", "fp16", "bf16"});
  expect_refused(generate({"--prompt", kKing, "--index-dtype", "int8"}), {"--index-dtype", "int8", "fp8"});
  expect_refused(generate({"--prompt", kKing, "--kv-dtype", "e4m3_per_token"}),
                 {"e4m3_per_token", "fp32, bf16, e4m3, packed656"});
  expect_refused(generate({"--prompt", kKing, "--kv-scale", "2"}), {"--kv-scale", "2", "e4m3"});
  for (const char* scale : {"0", "-1", "nan", "inf"})
    expect_refused(generate({"--prompt", kKing, "--kv-dtype", "e4m3", "--kv-scale", scale}),
                   {"--kv-scale", scale, "finite positive"});
  expect_refused(generate({"--prompt", kKing, "--speculate", "8"}), {"--speculate", "8", "7"});
  expect_refused(generate({"--prompt", kKing, "--speculate", "-1"}), {"--speculate", "-1"});
  expect_refused({"generate", "--model", checkpoint_dir("v3-yarn"), "--ids", "1", "--speculate", "1"},
                 {"v3-yarn", "num_nextn_predict_layers", "MTP"});
  expect_refused(generate({"--prompt", kKing, "--query-dtype", "fp16"}), {"--query-dtype", "fp16"});
  expect_refused(generate({"--prompt", kKing, "--page-size", "48"}), {"--page-size", "48", "64"});
  expect_refused(generate({"--prompt", kKing, "--page-size", "32"}), {"--page-size", "32", "64"});
  expect_refused(generate({"--prompt", kKing, "--page-size", "0"}), {"page-size", "0"});
  expect_refused({"generate", "--model", checkpoint_dir("v3-yarn"), "--ids", "1", "--page-size", "128"},
                 {"--page-size", "128", "32", "64"});
  expect_refused({"generate", "--model", checkpoint_dir("v3-yarn"), "--ids", "1", "--index-dtype", "fp8"},
                 {"--index-dtype", "indexer"});
  expect_refused({"generate", "--model", checkpoint_dir("v3-yarn"), "--ids", "1", "--index-hadamard"},
                 {"--index-hadamard", "indexer"});
  const std::string dense = checkpoint_dir("v3-yarn");
  expect_refused({"generate", "--model", dense, "--ids", "1", "--prefill-form", "quick"},
                 {"--prefill-form", "quick", "auto, expanded, absorbed"});
  expect_refused(
      {"generate", "--model", dense, "--ids", "1", "--device", "cpu", "--invariant", "--prefill-form", "expanded"},
      {"--prefill-form", "expanded", "auto, absorbed", "invariant"});
  expect_refused(generate({"--prompt", kKing, "--prefill-form", "expanded"}),
                 {"--prefill-form", "expanded", "auto, absorbed", "sparse"});
  expect_refused({"verify", "--model", dense, "--prefill-form", ""}, {"--prefill-form", "auto, expanded, absorbed"});
  expect_refused({"verify", "--op", "rope", "--prefill-form", "absorbed"}, {"--prefill-form", "--model"});
  expect_refused({"bench", "--op", "topk", "--keys", "0"}, {"--keys", "0", "prefill_form"});
  expect_refused(generate({"--prompt", kKing, "--pages", "999999999"}), {"--pages", "999999999", "33554430"});
  expect_refused(generate({"--prompt-file", "/dev/zero"}), {"/dev/zero", "2097152 bytes", "max_position_embeddings"});
  expect_refused(generate({"--prompt", kKing, "--backend", "flash"}), {"flash", "dsa"});
  expect_refused(generate({"--prompt", kKing, "--impl", "avx9"}), {"avx9", "portable"});
  for (const char* seed : {"-1", "18446744073709551616", "010", "1.5", "many"})
    expect_refused(generate({"--prompt", kKing, "--seed", seed}), {"--seed", seed, "18446744073709551615"});
  expect_refused({"bench", "--dtype", "int9"}, {"--dtype", "int9", "bf16", "fp32"});
  expect_refused({"bench", "--op", "levitate"}, {"--op", "levitate", "mla_decode"});
  expect_refused({"verify", "--op", "levitate"}, {"levitate"});
  expect_refused({"verify", "--op", ""}, {"--op", "empty"});
  expect_refused({"verify", "--model", ""}, {"--model", "empty"});
  expect_refused({"verify", "--model", kModel, "--op", "rope"}, {"--model", "--op"});
  expect_refused({"verify", "--op", "rope", "--threads", "2"}, {"--threads", "2", "--model"});
  expect_refused({"verify", "--op", "rope", "--precision", "zzz"}, {"--precision", "--model"});
  expect_refused({"verify", "--op", "rope", "--kv-dtype", "bf16"}, {"--kv-dtype", "--model"});
  expect_refused({"verify", "--op", "rope", "--invariant"}, {"--invariant", "--model"});
  expect_refused({"generate", "--model", kModel, "--prompt", "x", "--device", "tpu"}, {"--device", "tpu", "cpu"});
  expect_refused({"generate", "--model", kModel, "--prompt", "x", "--device", "cpu", "--precision", "bf16"},
                 {"--precision", "bf16", "fp32"});
  expect_refused({"verify", "--model", kModel, "--impl", "avx9"}, {"avx9", "portable"});
  expect_refused({"verify", "--model", kModel, "--backend", "flash"}, {"flash", "dsa"});
  expect_refused({"verify", "--model", kModel, "--page-size", "48"}, {"--page-size", "48"});
  expect_refused({"info", "--impl", "avx9"}, {"--impl", "avx9", "portable"});
  expect_refused({"info", "--threads", "4096"}, {"--threads", "4096", "1024"});
  expect_refused({"bench", "--threads", "4096"}, {"--threads", "4096", "1024"});
  expect_refused({"bench", "--min-time", "nan"}, {"--min-time", "nan", "3600"});
  expect_refused({"bench", "--min-time", "-1"}, {"--min-time", "-1"});
  expect_refused({"bench", "--impl", "avx9"}, {"--impl", "avx9", "portable"});
  expect_refused({"bench", "--where", "h=16"}, {"--where", "h=16", "cuda"});
  expect_refused({"bench", "--every", "2"}, {"--every", "2", "cuda"});
  expect_refused({"bench", "--against", "peers.jsonl"}, {"--against", "peers.jsonl", "cuda"});
  expect_refused({"bench", "--op", "topk", "--model", kModel}, {"--model", kModel, "generate"});
  expect_refused({"bench", "--model", ""}, {"--model", "empty"});
  expect_refused({"bench", "--model", (scratch() / "nowhere").string()}, {"nowhere"});
  expect_refused({"bench", "--new-tokens", "5"}, {"--new-tokens", "5", "--model"});
  expect_refused({"bench", "--op", "generate", "--model", kModel, "--prompt-tokens", "9000"},
                 {"--prompt-tokens", "9000", "8192"});
  expect_refused({"verify", "--model", kModel, "--chunk", "0"}, {"--chunk", "0"});
}

TEST(BadInput, Prompts) {
  expect_refused(generate({"--prompt", ""}), {"empty"});
  expect_refused(generate({}), {"standard input", "empty"});
  expect_refused(generate({"--prompt", "abc\xff\xfe"}), {"--prompt", "UTF-8"});
  expect_refused(generate({}), {"standard input", "UTF-8"}, "abc\xc3\x28");
  spit(scratch() / "latin1", "caf\xe9 au lait");
  expect_refused(generate({"--prompt-file", (scratch() / "latin1").string()}), {"latin1", "UTF-8", "3"});
  spit(scratch() / "nothing", "");
  expect_refused(generate({"--prompt-file", (scratch() / "nothing").string()}), {"nothing", "empty"});
  expect_refused(generate({"--prompt-file", (scratch() / "absent").string()}), {"absent"});
  expect_refused(generate({"--prompt-file", scratch().string()}), {scratch().string()});
  expect_refused(generate({"--prompt", kKing, "--ids", "1"}), {"--prompt", "--ids"});
  expect_refused(generate({"--ids", ""}), {"--ids"});
  expect_refused(generate({"--ids", "1,x"}), {"--ids", "1,x"});
  expect_refused(generate({"--ids", "1,,2"}), {"--ids", "1,,2"});
  expect_refused(generate({"--ids", "1,2,"}), {"--ids", "1,2,"});
  expect_refused(generate({"--ids", "-1"}), {"-1"});
  expect_refused(generate({"--ids", "99999999999"}), {"--ids", "99999999999"});
  expect_refused(generate({"--ids", "2048"}), {"2048", "2047"});
  std::string long_ids = "0";
  for (int i = 0; i < 8192; ++i) long_ids += ",5";
  expect_refused(generate({"--ids", long_ids}), {"8193", "8192", "max_position_embeddings"});
  expect_refused(generate({"--ids", long_ids.substr(0, 2 * 129 - 1), "--pages", "2"}), {"129", "128", "pool"});
}

TEST(BadInput, Directories) {
  expect_refused(on_model(scratch() / "nowhere"), {"nowhere"});
  expect_refused({"info", "--model", (scratch() / "nowhere").string()}, {"nowhere"});
  expect_refused({"verify", "--model", (scratch() / "nowhere").string()}, {"nowhere"});
  fs::create_directories(scratch() / "bare");
  expect_refused(on_model(scratch() / "bare"), {"bare", "config.json"});
  expect_refused(
      on_model(broken_model("no_shard", [](const fs::path& d) { fs::remove(d / "model-00002-of-00002.safetensors"); })),
      {"model-00002-of-00002.safetensors"});
  expect_refused(
      on_model(broken_model("no_index", [](const fs::path& d) { fs::remove(d / "model.safetensors.index.json"); })),
      {"no_index", "safetensors"});
  const fs::path no_tokenizer =
      broken_model("no_tokenizer", [](const fs::path& d) { fs::remove(d / "tokenizer.json"); });
  expect_refused({"generate", "--model", no_tokenizer.string(), "--prompt", kKing}, {"tokenizer.json"});
  const Ran ids_only = gannet_command(on_model(no_tokenizer));  // ids need none
  EXPECT_EQ(ids_only.code, 0) << ids_only.err;
  expect_refused(generate({"--prompt", kKing, "--tokenizer", (scratch() / "none.json").string()}), {"none.json"});
  expect_refused({"verify", "--model",
                  broken_model("no_golden", [](const fs::path& d) { fs::remove(d / "golden.json"); }).string()},
                 {"golden.json"});
}

TEST(BadInput, Configs) {
  const auto refused = [&](const std::string& name, const std::function<void(nlohmann::json&)>& change,
                           std::vector<std::string> words) {
    words.push_back("config.json");
    expect_refused(on_model(with_config(name, change)), words);
  };
  refused("arch", [](auto& c) { c["architectures"] = {"LlamaForCausalLM"}, c["model_type"] = "llama"; },
          {"LlamaForCausalLM"});
  refused("soft_cap", [](auto& c) { c["attn_logit_softcapping"] = 50.0; }, {"attn_logit_softcapping", "50"});
  refused("no_q_lora", [](auto& c) { c["q_lora_rank"] = nullptr; }, {"q_lora_rank"});
  refused("eos", [](auto& c) { c["eos_token_id"] = 2048; }, {"eos_token_id", "2048", "2047"});
  refused("no_hidden", [](auto& c) { c.erase("hidden_size"); }, {"hidden_size"});
  refused("negative", [](auto& c) { c["num_hidden_layers"] = -4; }, {"num_hidden_layers", "-4"});
  refused("rope", [](auto& c) { c["rope_scaling"] = {{"type", "longrope"}, {"factor", 2.0}}; }, {"longrope"});
  refused("scoring", [](auto& c) { c["scoring_func"] = "softmax"; }, {"scoring_func", "softmax"});
  refused("topk_method", [](auto& c) { c["topk_method"] = "greedy"; }, {"topk_method", "greedy"});
  expect_refused(on_model(broken_model("no_json",
                                       [](const fs::path& d) {
                                         fs::remove(d / "config.json");
                                         spit(d / "config.json", "{\"hidden_size\": ");
                                       })),
                 {"config.json"});
}

TEST(BadInput, PipesInPlaceOfFiles) {
  for (const char* name : {"config.json", "tokenizer.json", "model-00001-of-00002.safetensors"}) {
    const fs::path dir = broken_model("pipe", [&](const fs::path& d) {
      fs::remove(d / name);
      ASSERT_EQ(mkfifo((d / name).c_str(), 0600), 0);
    });
    expect_refused(on_model(dir), {name, "regular file"});
  }
}

TEST(BadInput, WeightsThatAreNaN) {
  const std::string shard = "model-00002-of-00002.safetensors";
  std::string bytes = slurp(fs::path(kModel) / shard);
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  std::fill(bytes.begin() + 8 + static_cast<std::ptrdiff_t>(header), bytes.end(), '\xff');
  const Ran r = gannet_command(on_model(broken_model("nan_weights", [&](const fs::path& d) {
    fs::remove(d / shard);
    spit(d / shard, bytes);
  })));
  EXPECT_EQ(r.code, 2) << r.out << r.err;
  EXPECT_NE(r.err.find("NaN"), std::string::npos) << r.err;
}

/// v3-yarn with golden files of its own: `change` edits golden.json and the bytes of golden.safetensors.
fs::path with_golden(const std::string& name, const std::function<void(nlohmann::json&, std::string&)>& change) {
  const fs::path dir = scratch() / name;
  fs::remove_all(dir);
  fs::create_directories(dir);
  for (const auto& entry : fs::directory_iterator(checkpoint_dir("v3-yarn")))
    fs::create_symlink(entry.path(), dir / entry.path().filename());
  nlohmann::json json = nlohmann::json::parse(slurp(dir / "golden.json"));
  std::string tensors = slurp(dir / "golden.safetensors");
  change(json, tensors);
  for (const char* file : {"golden.json", "golden.safetensors"}) fs::remove(dir / file);
  spit(dir / "golden.json", json.dump());
  spit(dir / "golden.safetensors", tensors);
  return dir;
}

/// Fills the bytes of each tensor whose name ends with `suffix`.
void fill_tensors(std::string& file, const std::string& suffix, char byte) {
  uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof header);
  const nlohmann::json tensors = nlohmann::json::parse(file.substr(8, header));
  for (const auto& [name, tensor] : tensors.items()) {
    if (name.size() < suffix.size() || name.substr(name.size() - suffix.size()) != suffix) continue;
    const auto begin = 8 + header + tensor["data_offsets"][0].get<uint64_t>();
    const auto end = 8 + header + tensor["data_offsets"][1].get<uint64_t>();
    std::fill(file.begin() + static_cast<std::ptrdiff_t>(begin), file.begin() + static_cast<std::ptrdiff_t>(end), byte);
  }
}

// A check that compares nothing must not pass.
TEST(BadInput, GoldenFiles) {
  const auto refused = [](const fs::path& dir, const std::vector<std::string>& words) {
    const Ran r = gannet_command({"verify", "--kv-dtype", "fp32", "--model", dir.string()});
    EXPECT_EQ(r.code, 2) << dir << r.out << r.err;
    EXPECT_EQ(r.out.find("all checks passed"), std::string::npos) << r.out;
    for (const std::string& word : words) EXPECT_NE(r.err.find(word), std::string::npos) << word << " in " << r.err;
  };
  refused(with_golden("golden_empty", [](nlohmann::json& j, std::string&) { j = nlohmann::json::object(); }),
          {"golden.json", "no prompts"});
  refused(with_golden("golden_nan", [](nlohmann::json&, std::string& t) { fill_tensors(t, ".top8_logprobs", '\xff'); }),
          {"top8_logprobs", "nan"});
  refused(with_golden("golden_ids", [](nlohmann::json&, std::string& t) { fill_tensors(t, ".top8_ids", '\x7f'); }),
          {"top8_ids", "2139062143", "2047"});
  refused(with_golden("golden_negative", [](nlohmann::json&, std::string& t) { fill_tensors(t, ".ids", '\xff'); }),
          {".ids", "-1", "2047"});
  for (const size_t n : {size_t{0}, size_t{6000}})
    refused(
        with_golden("golden_length",
                    [&](nlohmann::json& j, std::string&) { j.begin().value()["greedy_ids"] = std::vector<int>(n, 5); }),
        {"greedy_ids", "1 to", "context"});
  refused(with_golden("golden_greedy",
                      [](nlohmann::json& j, std::string&) { j.begin().value()["greedy_ids"][0] = 4294967528; }),
          {"greedy_ids", "2047"});
}

TEST(BadInput, Weights) {
  const std::string shard = "model-00001-of-00002.safetensors";
  const std::string bytes = slurp(fs::path(kModel) / shard);
  const auto with_shard = [&](const std::string& name, const std::string& content) {
    return broken_model(name, [&](const fs::path& d) {
      fs::remove(d / shard);
      spit(d / shard, content);
    });
  };
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  const auto with_header = [&](const std::string& text) {
    const uint64_t n = text.size();
    std::string out(sizeof n, '\0');
    std::memcpy(out.data(), &n, sizeof n);
    return out + text + bytes.substr(8 + header);
  };
  const std::string json = bytes.substr(8, header);
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = json;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  expect_refused(on_model(with_shard("truncated", bytes.substr(0, bytes.size() / 2))), {shard});
  expect_refused(on_model(with_shard("tiny_file", bytes.substr(0, 5))), {shard});
  expect_refused(on_model(with_shard("empty_file", "")), {shard});
  expect_refused(on_model(with_shard("rest", bytes + "xx")), {shard});
  expect_refused(on_model(with_shard("long_header", std::string(8, '\x7f') + bytes.substr(8))), {shard, "header"});
  expect_refused(on_model(with_shard("no_header", with_header("[1, 2"))), {shard});
  expect_refused(on_model(with_shard("wrong_dtype", with_header(replaced("\"BF16\"", "\"F16\"")))), {shard, "F16"});
  expect_refused(on_model(with_shard("unknown_dtype", with_header(replaced("\"BF16\"", "\"Q4\"")))), {shard, "Q4"});
  expect_refused(
      on_model(with_shard("overlap", with_header(replaced("\"data_offsets\":[0,32]", "\"data_offsets\":[0,64]")))),
      {shard});
  expect_refused(on_model(with_shard("out_of_range", with_header(replaced("\"data_offsets\":[0,32]",
                                                                          "\"data_offsets\":[0,99999999]")))),
                 {shard});
  expect_refused(
      on_model(with_shard("wrong_shape", with_header(replaced("\"shape\":[2048,256]", "\"shape\":[256,2048]")))),
      {"model.embed_tokens.weight", "2048", "256"});
  expect_refused(on_model(with_shard("missing_tensor",
                                     with_header(replaced("model.embed_tokens.weight", "model.embed_tokens.heavy")))),
                 {"model.embed_tokens.weight"});
}

}  // namespace
}  // namespace gannet::e2e
