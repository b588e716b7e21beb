// The probe environment [8.1] as a client in C++: every answer of it can be predicted, so a checker sees what was done.
//
//   g++ -std=c++17 -O2 -o probe probe.cpp && ./probe --num-envs 3 --url ws://127.0.0.1:8000
//
// docs/conformance.md is about the checker, plugrl-conformance --probe.
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "command_line.hpp"
#include "plugrl_client.hpp"

// Count the steps, repeat the last action, pay 1 per step, terminate at 3, 5 or 7 steps.
class Probe : public plugrl::Env {
public:
    Probe(long index, long action_dim) : length_(3 + 2 * (index % 3)), action_(static_cast<std::size_t>(action_dim)) {}

    plugrl::Spec spec() const override {
        const double infinity = std::numeric_limits<double>::infinity();
        const auto width = static_cast<std::int64_t>(action_.size());
        plugrl::Spec spec;
        spec.observation = {{"t", plugrl::box<double>({1}, 0.0, infinity)},
                            {"a", plugrl::box<double>({width}, -infinity, infinity)}};
        spec.action = plugrl::box<float>({width}, -std::numeric_limits<float>::infinity(),
                                         std::numeric_limits<float>::infinity());
        spec.env_id = "Probe";
        return spec;
    }

    void reset(const plugrl::Seed&, plugrl::Observation& first) override {
        t_ = 0;
        action_.assign(action_.size(), 0.0);
        observe(first);
    }

    plugrl::Step step(const plugrl::Action& action, plugrl::Observation& next) override {
        ++t_;
        for (std::size_t i = 0; i < action_.size(); ++i) action_[i] = action[i];
        observe(next);
        plugrl::Step done;
        done.reward = 1.0;
        done.terminated = t_ == length_;
        return done;
    }

private:
    void observe(plugrl::Observation& out) const {
        out.set(0, {static_cast<double>(t_)});
        out.set(1, action_);
    }

    long length_, t_ = 0;
    std::vector<double> action_;
};

int main(int argc, char** argv) {
    command_line::Arguments arguments = command_line::parse(argc, argv);
    plugrl::Envs envs;
    for (long i = 0; i < arguments.num_envs; ++i) envs.push_back(std::make_unique<Probe>(i, arguments.action_dim));
    return command_line::serve(std::move(arguments.options), std::move(envs));
}
