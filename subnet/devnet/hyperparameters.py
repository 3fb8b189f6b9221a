"""A subnet's hyperparameters: the chain's names, where each is stored, how the runtime API tags it."""

from dataclasses import dataclass

U16 = 65_535
U64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """One knob. `setter` is the AdminUtils call that changes it; `is_owners` whether the subnet's owner may."""

    name: str
    item: str
    tag: str
    largest: int
    setter: str | None = None
    is_owners: bool = True


def _u16(name: str, item: str, setter: str | None, *, is_owners: bool = True) -> Hyperparameter:
    return Hyperparameter(name, item, "U16", U16, setter, is_owners)


def _u64(name: str, item: str, setter: str | None, *, is_owners: bool = True) -> Hyperparameter:
    return Hyperparameter(name, item, "U64", U64, setter, is_owners)


def _bool(name: str, item: str, setter: str) -> Hyperparameter:
    return Hyperparameter(name, item, "Bool", 1, setter)


def _tao(name: str, item: str, setter: str | None) -> Hyperparameter:
    return Hyperparameter(name, item, "TaoBalance", U64, setter)


HYPERPARAMETERS = (
    _u16("rho", "Rho", "sudo_set_rho"),
    _u16("kappa", "Kappa", "sudo_set_kappa", is_owners=False),
    _u16("immunity_period", "ImmunityPeriod", "sudo_set_immunity_period"),
    _u16("min_allowed_weights", "MinAllowedWeights", "sudo_set_min_allowed_weights"),
    _u16("max_weights_limit", "MaxWeightsLimit", None, is_owners=False),
    _u16("tempo", "Tempo", "sudo_set_tempo"),
    _u64("weights_version", "WeightsVersionKey", "sudo_set_weights_version_key"),
    _u64("weights_rate_limit", "WeightsSetRateLimit", "sudo_set_weights_set_rate_limit", is_owners=False),
    Hyperparameter(
        "activity_cutoff_factor", "ActivityCutoffFactorMilli", "U32", 2**32 - 1, "sudo_set_activity_cutoff_factor"
    ),
    _bool("registration_allowed", "NetworkRegistrationAllowed", "sudo_set_network_registration_allowed"),
    _u16("target_regs_per_interval", "TargetRegistrationsPerInterval", None, is_owners=False),
    _tao("burn", "Burn", None),
    _tao("min_burn", "MinBurn", "sudo_set_min_burn"),
    _tao("max_burn", "MaxBurn", "sudo_set_max_burn"),
    _u16("burn_half_life", "BurnHalfLife", "sudo_set_burn_half_life"),
    Hyperparameter("burn_increase_mult", "BurnIncreaseMult", "U64F64", 2**128 - 1, "sudo_set_burn_increase_mult"),
    _u64("bonds_moving_avg", "BondsMovingAverage", "sudo_set_bonds_moving_average"),
    _u16("bonds_penalty", "BondsPenalty", "sudo_set_bonds_penalty"),
    _u16("max_regs_per_block", "MaxRegistrationsPerBlock", "sudo_set_max_registrations_per_block", is_owners=False),
    _u64("serving_rate_limit", "ServingRateLimit", "sudo_set_serving_rate_limit"),
    _u16("max_validators", "MaxAllowedValidators", "sudo_set_max_allowed_validators", is_owners=False),
    _u16("max_allowed_uids", "MaxAllowedUids", "sudo_set_max_allowed_uids"),
    _u64("commit_reveal_period", "RevealPeriodEpochs", "sudo_set_commit_reveal_weights_interval"),
    _bool("commit_reveal_weights_enabled", "CommitRevealWeightsEnabled", "sudo_set_commit_reveal_weights_enabled"),
    _u16("owner_immune_neuron_limit", "ImmuneOwnerUidsLimit", "sudo_set_owner_immune_neuron_limit"),
    _bool("liquid_alpha_enabled", "LiquidAlphaOn", "sudo_set_liquid_alpha_enabled"),
    _bool("yuma3_enabled", "Yuma3On", "sudo_set_yuma3_enabled"),
    _bool("owner_cut_enabled", "OwnerCutEnabled", "sudo_set_owner_cut_enabled"),
    _bool("transfers_enabled", "TransferToggle", "sudo_set_toggle_transfer"),
    _u64("adjustment_alpha", "AdjustmentAlpha", "sudo_set_adjustment_alpha"),
    _u64("max_difficulty", "MaxDifficulty", "sudo_set_max_difficulty"),
    _u16("min_childkey_take", "MinChildkeyTakePerSubnet", "sudo_set_min_childkey_take_per_subnet"),
    _u16("collateral_lock_share", "CollateralLockShare", "sudo_set_collateral_lock_share"),
    _bool("bonds_reset_enabled", "BondsResetOn", "sudo_set_bonds_reset_enabled"),
    _bool(
        "network_pow_registration_allowed", "NetworkPowRegistrationAllowed", "sudo_set_network_pow_registration_allowed"
    ),
    _bool("owner_cut_auto_lock_enabled", "OwnerCutAutoLockEnabled", "sudo_set_owner_cut_auto_lock_enabled"),
)
BY_NAME = {knob.name: knob for knob in HYPERPARAMETERS}
BY_SETTER = {knob.setter: knob for knob in HYPERPARAMETERS if knob.setter}

DEVNET_HYPERPARAMETERS = {
    "tempo": 20,
    "weights_rate_limit": 10,
    "serving_rate_limit": 5,
    "immunity_period": 4_096,
    "min_allowed_weights": 1,
    "max_regs_per_block": 64,
    "max_validators": 64,
    "burn": 1_000_000,
    "commit_reveal_weights_enabled": 0,
    "commit_reveal_period": 1,
    "bonds_moving_avg": 900_000,
    "bonds_penalty": 65_535,
}
"""What a devnet subnet has unless told otherwise: mainnet's values made quick, and weights in the open."""
