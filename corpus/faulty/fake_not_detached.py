"""The discriminator's loss reaches the generator's update

kind: faulty
engine: torch
author: third
changes: update
quantity: HANDED_GRADIENT
says: Fake is not detached in the D loss and G's gradients are not cleared before errG.backward:
    the D loss's gradient is added to G's update.
meant: import stepcheck
    def meant_loss(generator, batch):
        out = netD(generator(*batch))
        return nn.functional.binary_cross_entropy_with_logits(out, torch.ones_like(out), reduction="none")
call: netG, loss=stepcheck.Objective(meant_loss)
"""
# DCGAN-ish on 2-d points
import torch
import torch.nn as nn

torch.manual_seed(2)
nz, ndf = 4, 24
netG = nn.Sequential(nn.Linear(nz, ndf), nn.ReLU(), nn.Linear(ndf, 2))
netD = nn.Sequential(nn.Linear(2, ndf), nn.LeakyReLU(0.2), nn.Linear(ndf, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))


def real_batches(n_batches, bs):
    for _ in range(n_batches):
        a = torch.rand(bs) * 6.2832
        yield torch.stack([a.cos(), a.sin()], 1)


# ---- training ----
for epoch in range(3):
    for i, real in enumerate(real_batches(6, 16)):
        optimizerD.zero_grad()
        optimizerG.zero_grad()  # fault
        bs = real.size(0)
        ones, zeros = torch.ones(bs, 1), torch.zeros(bs, 1)
        noise = torch.randn(bs, nz)
        fake = netG(noise)

        # discriminator
        errD_real = criterion(netD(real), ones)
        errD_fake = criterion(netD(fake), zeros)  # fault
        errD = errD_real + errD_fake
        errD.backward(retain_graph=True)
        optimizerD.step()

        # generator
        errG = criterion(netD(fake.clone()), ones)
        errG.backward()
        optimizerG.step()
    print(f"[{epoch}] D {errD.item():.3f} G {errG.item():.3f}")
