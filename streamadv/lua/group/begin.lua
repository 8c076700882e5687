-- Admit and open a group before its rollouts are played.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes
-- ARGV  those of an admission, see lib/admit; nonce of this call, under which the group knows who has its tickets
-- Returns  {'ok' | 'open', epoch, version or '', slots}   opened, or open already
--          {'ended', letter}                       it has ended
--          {'busy', reason, used, limit}           not admitted now
--          {'mismatch', size}                      open with another size
--          {'layout'}                              the run may have another number of shards: read the manifest again
--          {'broken'}                              its hash is not what the scripts wrote
-- include clock
-- include sizes
-- include admit
-- include play
-- include ended
-- include holders
-- include adopt
local spec = admission_of(ARGV)

local text = find_ended(keys, spec.id)
if text then return {'ended', string.sub(text, 1, 1)} end
local state = 'open'
local nonce = ARGV[ADMISSION_ARGS + 1]
local open = redis.pcall('HMGET', keys.group, 'size', 'slots', 'epoch', 'holders')
for i = 1, 3 do
  if open.err or (open[1] and not string.match(open[i] or '', '^%d+$')) then return {'broken'} end
end
local size = open[1]
if not size then
  local refused = open_group(keys, spec)
  if refused then return refused end
  redis.call('HSET', keys.group, 'holders', nonce)
  state = 'ok'
elseif size ~= spec.size then
  return {'mismatch', size}
elseif open[4] == '' and is_withdrawn(keys.group) then
  adopt(keys, spec, nonce)
  state = 'ok'
elseif open[4] and #open[4] < MAX_HOLDERS and not string.find(open[4], nonce, 1, true) then
  redis.call('HSET', keys.group, 'holders', open[4] .. ' ' .. nonce)
end
local tickets = redis.call('HMGET', keys.group, 'epoch', 'version', 'slots')
return {state, tickets[1], tickets[2], tickets[3]}
