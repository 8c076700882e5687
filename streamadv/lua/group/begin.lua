-- Admit and open a group before its rollouts are played.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes
-- ARGV  the group (see lib/enter); producer; limits (see lib/admit); nonce of this call, under which the group knows who has its
--       tickets; newest version whose weights the caller knows of ('' = none)
-- Returns  {'ok' | 'open', epoch, version or '', slots, bytes reserved for a slot, weights}   opened, or open
--          already. weights: '<version> <URI>' if the caller does not know of them, else ''
--          {'ended', letter}                       it has ended
--          {'busy', reason, used, limit ...}       not admitted now
--          {'over'}                                the trainer has ended the run
--          {'mismatch', size, role}                open with another size or role
--          {'layout'}                              the run may have another number of shards: read the manifest again
--          {'broken'}                              its hash is not what the scripts wrote
-- include clock
-- include count
-- include sizes
-- include group
-- include ended
-- include enter
local spec, producer, limits, nonce, known = spec_of(ARGV, 1), unpack(ARGV, SPEC_ARGS + 1)

local group = load_group(spec.id, keys.group)
local tombstone = group.state == 'none' and find_ended(spec.id)
if tombstone then return {'ended', string.sub(tombstone, 1, 1)} end
local group, is_opened, refused = enter(group, spec, producer, limits, nonce)
if refused then return refused end
if is_opened then
  change(group, 'holders', nonce)
elseif group.holders and #group.holders < MAX_HOLDERS and not string.find(group.holders, nonce, 1, true) then
  change(group, 'holders', group.holders .. ' ' .. nonce)
end
save_group(group)
write_counts()
write_sizes()
local weights = admission and admission.weights or ''
if string.match(weights, '^%d+') == known then weights = '' end
return {is_opened and 'ok' or 'open', group.epoch, group.version, #group.slots, group.slot_bytes, weights}
