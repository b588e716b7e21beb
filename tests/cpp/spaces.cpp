// A client whose envs have every kind of space, in an order that is not the alphabet's; for tests/cpp/test_digest.py.
//
//   spaces URL ENVS ACTION       ACTION: box, wide, whole, discrete, multi_discrete, multi_binary
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugrl_client.hpp"

namespace {

plugrl::Space action_space(const std::string& name) {
    if (name == "box") return plugrl::box<float>({2}, -1.0F, 1.0F);
    if (name == "wide") return plugrl::box<double>({2, 2}, -1.0, 1.0);
    if (name == "whole") return plugrl::box<std::int16_t>({3}, -5, 5);
    if (name == "discrete") return plugrl::discrete(5, -1);
    if (name == "multi_discrete") return plugrl::multi_discrete({3, 4});
    return plugrl::multi_binary(3);
}

class Mixed : public plugrl::Env {
public:
    Mixed(std::string action, std::size_t length) : action_(std::move(action)), length_(length) {}

    plugrl::Spec spec() const override {
        plugrl::Spec spec;
        spec.observation = {{"words", plugrl::text(6, "ab\u00e9")}, {"x", plugrl::box<double>({3}, -1e300, 1e300)},
                            {"image", plugrl::image(3, 2, 3)},      {"mode", plugrl::discrete(3)},
                            {"b", plugrl::multi_binary(5)},         {"few", plugrl::box<std::uint16_t>({3}, 0, 65535)}};
        spec.action = action_space(action_);
        return spec;
    }
    void reset(const plugrl::Seed&, plugrl::Observation& first) override {
        ++episode_;
        t_ = 0;
        observe(first);
    }
    plugrl::Step step(const plugrl::Action& action, plugrl::Observation& next) override {
        plugrl::Step done;
        done.reward = -0.0;  // what it is at times stays so on its way
        for (std::size_t i = 0; i < action.size && t_ % 2 == 0; ++i) done.reward += action[i] / 3.0;
        const bool ends = ++t_ == length_;
        done.terminated = ends && episode_ % 3 != 1;
        done.truncated = ends && episode_ % 3 != 0;
        observe(next);
        return done;
    }

private:
    void observe(plugrl::Observation& out) {
        ++seen_;
        out.set_text(0, std::string(seen_ % 5, 'a') + (seen_ % 2 == 0 ? "\u00e9" : ""));
        out.set(1, {static_cast<double>(seen_) / 7.0, seen_ % 4 == 0 ? 1e200 : -0.0, -0.1});
        for (std::size_t i = 0; i < 18; ++i) out.at<std::uint8_t>(2)[i] = static_cast<std::uint8_t>(seen_ * 31 + i);
        out.set(3, {static_cast<std::int64_t>(seen_ % 3)});
        for (std::size_t i = 0; i < 5; ++i) out.at<std::int8_t>(4)[i] = (seen_ >> i & 1) != 0;
        for (std::size_t i = 0; i < 3; ++i) out.at<std::uint16_t>(5)[i] = static_cast<std::uint16_t>(seen_ * 9999 + i);
    }

    std::string action_;
    std::size_t length_, t_ = 0, episode_ = 0, seen_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    plugrl::Options options;
    options.url = argv[1];
    options.log = [](bool, const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); };
    plugrl::Envs envs;
    for (std::size_t i = 0; i < std::stoul(argv[2]); ++i) envs.push_back(std::make_unique<Mixed>(argv[3], 4 + i));
    try {
        plugrl::run(options, std::move(envs));
    } catch (const plugrl::Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
