-- Admit and open a group before its rollouts are played, and further ones like it as far as they are admitted too.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes, others: group ...
-- ARGV  the group (see lib/enter); producer; limits (see lib/admit); nonce of this call, under which the group knows who has its
--       tickets; newest version whose weights the caller knows of ('' = none); ids of the further groups
-- Returns  {'ok' | 'open', epoch, version or '', slots, bytes reserved for a slot, weights, how many of the further
--          ones}   opened, or open already. weights: '<version> <URI>' if the caller does not know of them, else ''
--          {'ended', letter}                       it has ended
--          or a refusal (lib/enter)
-- include enter
local spec, producer, limits, nonce, known = spec_of(ARGV, 1), unpack(ARGV, SPEC_ARGS + 1)

local group = load_group(spec.id, keys.group)
local tombstone = group.state == 'none' and find_ended(spec.id)
if tombstone then return {'ended', string.sub(tombstone, 1, 1)} end
local group, is_opened, refused = enter(group, spec, producer, limits, nonce)
if refused then return refused end

local function hold(group, is_opened)
  if is_opened then
    change(group, 'holders', nonce)
  elseif group.holders and #group.holders < MAX_HOLDERS and not string.find(group.holders, nonce, 1, true) then
    change(group, 'holders', group.holders .. ' ' .. nonce)
  end
  save_group(group)
end

hold(group, is_opened)
local others = 0
for i, hash in ipairs(keys.others) do
  spec.id = ARGV[SPEC_ARGS + 4 + i]
  local other, is_new = enter(load_group(spec.id, hash), spec, producer, limits, nonce)
  if not other then break end
  hold(other, is_new)
  others = i
end
write_figures()
local weights = admission and admission.weights or ''
if string.match(weights, '^%d+') == known then weights = '' end
return {is_opened and 'ok' or 'open', group.epoch, group.version, #group.slots, group.slot_bytes, weights, others}
