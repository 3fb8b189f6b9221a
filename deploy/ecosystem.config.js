// pm2 start deploy/ecosystem.config.js --only strata-miner
// Wallet, hotkey and netuid come from the environment pm2 is started in: BT_WALLET, BT_WALLET_HOTKEY, STRATA_NETUID.

const role = (name) => ({
  name: `strata-${name}`,
  script: ".venv/bin/strata",
  args: name,
  interpreter: "none",
  cwd: `${__dirname}/..`,
  autorestart: true,
  restart_delay: 15000,
  kill_timeout: 15000,
  // After these a person has to act first: see the exit codes in README.md.
  stop_exit_codes: [0, 64, 65, 66, 67, 68, 69, 72, 73, 74, 76, 77, 78, 79, 80],
});

module.exports = { apps: ["miner", "validator", "orchestrator"].map(role) };
