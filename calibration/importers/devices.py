"""What the sources call their GPUs and machines -> device kinds, and names of what joins them.

A topology is named as `simcore.collectives.topology` names a group of a cluster: nodes, kind of
device, kinds of link. Where two sources measured the same kind of machine with other software, the
source is added behind a semicolon; `plain` takes it off again.
"""

# name at the source, in lower case -> device kind
DEVICES: dict[str, str] = {
    "a100_sxm": "A100-SXM4-80GB",
    "h100_sxm": "H100-SXM5-80GB",
    "h200_sxm": "H200-SXM-141GB",
    "b200_sxm": "B200-SXM-180GB",
    "gb200": "GB200-186GB",
    "gb200_sxm": "GB200-186GB",
    "l40s": "L40S-48GB",
    "rtx_pro_6000_blackwell_server": "RTX-PRO-6000-96GB",
    "rtx_pro_6000": "RTX-PRO-6000-96GB",
    "tesla_p4": "P4-8GB",
    "tesla_p100-pcie-16gb": "P100-PCIe-16GB",
    "tesla_t4": "T4-16GB",
    "tesla_v100-pcie-32gb": "V100-PCIe-32GB",
    "nvidia_a100-pcie-40gb": "A100-PCIE-40GB",
    "nvidia_a100_80gb_pcie": "A100-PCIE-80GB",
    "nvidia_a100-sxm4-40gb": "A100-SXM4-40GB",
    "nvidia_l4": "L4-24GB",
    "nvidia_h100_80gb_hbm3": "H100-SXM5-80GB",
    "amd_instinct_mi100": "MI100-32GB",
    "amd_instinct_mi210": "MI210-64GB",
    "amd_instinct_mi250": "MI250-64GB",
    "m40": "M40-12GB",
    "titanx": "TitanX-12GB",
    "p100": "P100-PCIe-16GB",
    "v100": "V100-SXM2-16GB",
    "t4": "T4-16GB",
    "mi25": "MI25-16GB",
    "knl7250": "KNL7250",
    "a100": "A100-SXM4-80GB",
    "h100": "H100-SXM5-80GB",
    "a40": "A40-48GB",
    "a100-40": "A100-SXM4-40GB",
    "a100-80": "A100-SXM4-80GB",
    "v100-16": "V100-SXM2-16GB",
    "gh-96": "GH200-96GB",
    "rtx-2080": "RTX-2080Ti-11GB",  # 11,811,160,064 bytes in its cluster file
    "rtx-3090": "RTX-3090-24GB",
    "titan-rtx": "Titan-RTX-24GB",
    "v100-sxm2-16gb": "V100-SXM2-16GB",
    "v100-sxm2-32gb": "V100-SXM2-32GB",
    "a100-80gb": "A100-SXM4-80GB",
    "mi200": "MI250-64GB",
}
LINKS: dict[str, str] = {
    "A100-SXM4-80GB": "NVLink3-NVSwitch",
    "A100-SXM4-40GB": "NVLink3-NVSwitch",
    "H100-SXM5-80GB": "NVLink4-NVSwitch",
    "H200-SXM-141GB": "NVLink4-NVSwitch",
    "B200-SXM-180GB": "NVLink5-NVSwitch",
    "GB200-186GB": "NVLink5-NVSwitch",
    "GH200-96GB": "NVLink4-mesh",
    "L40S-48GB": "PCIe4x16",
    "RTX-PRO-6000-96GB": "PCIe5x16",
    "RTX-2080Ti-11GB": "PCIe3x16",
    "RTX-3090-24GB": "PCIe4x16",
    "Titan-RTX-24GB": "PCIe3x16",
    "P100-PCIe-16GB": "PCIe3x16",
    "M40-12GB": "PCIe3x16",
    "TitanX-12GB": "PCIe3x16",
    "V100-SXM2-16GB": "NVLink2-1+NVLink2-2",
    "V100-SXM2-32GB": "NVLink2-1+NVLink2-2",
    "MI250-64GB": "xGMI-MI200",
}


def device_of(name: str) -> str | None:
    """Returns the kind of a source's device, None where it is not known."""
    return DEVICES.get(name.lower().replace(" ", "_"))


def one_node(device: str, links: str = "", machine: str = "") -> str:
    """Returns the topology of a group inside one node."""
    return several_nodes(1, device, links or LINKS.get(device, "unknown"), machine)


def several_nodes(nodes: int, device: str, links: str, machine: str = "") -> str:
    """Returns the topology of a group on several nodes."""
    label = f"{nodes} node{'s' * (nodes > 1)}, {device}, {links}"
    return f"{label}; {machine}" if machine else label


def plain(topology: str) -> str:
    """Returns a topology without the machine it was measured on."""
    return topology.partition(";")[0]
