-- Admit and open a group before its rollouts are played.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes
-- ARGV  those of an admission, see lib/admit
-- Returns  {'ok' | 'open', epoch, version or '', places}   opened, or open already
--          {'ended', letter}                       it has ended
--          {'busy', reason, used, limit}           not admitted now
--          {'mismatch', size}                      open with another size
--          {'layout'}                              the run may have another number of shards: read the manifest again
--          {'broken'}                              its hash is not what the scripts wrote
-- include clock
-- include sizes
-- include admit
-- include ended
local keys = {group = KEYS[1], open = KEYS[2], groups = KEYS[3], ended = KEYS[4], ended_before = KEYS[5],
  ledger = KEYS[6], trainer = KEYS[7], sizes = KEYS[8]}
local spec = admission_of(ARGV)

local text = find_ended(keys, spec.id)
if text then return {'ended', string.sub(text, 1, 1)} end
local state = 'open'
local open = redis.pcall('HMGET', keys.group, 'size', 'places', 'epoch')
for i = 1, 3 do
  if open.err or (open[1] and not string.match(open[i] or '', '^%d+$')) then return {'broken'} end
end
local size = open[1]
if not size then
  local refused = open_group(keys, spec)
  if refused then return refused end
  state = 'ok'
elseif size ~= spec.size then
  return {'mismatch', size}
end
local tickets = redis.call('HMGET', keys.group, 'epoch', 'version', 'places')
return {state, tickets[1], tickets[2], tickets[3]}
